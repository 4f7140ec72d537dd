"""Silero VAD (Silero Team, MIT licence): is there speech in each 32 ms of audio at 16 kHz?

Weights of the wheel `silero-vad==6.2.3`: the 16 kHz half of `silero_vad.jit`, which its package loads by itself. (The wheel's
`silero_vad_16k.safetensors` holds other weights.) The model was made for a stream: each frame of 512 samples goes, with the 64 samples
before it, through a fixed spectrum, four convolutions and one step of an LSTM. Recordings are served as the package serves them, frame
after frame.
"""

from __future__ import annotations

from pathlib import Path

import torch

FRAME, CONTEXT, PAD, BINS = 512, 64, 64, 129
"""Samples of a frame, samples before it, samples mirrored behind it, and frequencies of the spectrum."""

NAMES = {
    "stft_conv.weight": "stft.forward_basis_buffer",
    **{
        f"conv{index + 1}.{kind}": f"encoder.{index}.reparam_conv.{kind}"
        for index in range(4)
        for kind in ("weight", "bias")
    },
    **{f"lstm_cell.{name}": f"decoder.rnn.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    **{f"final_conv.{kind}": f"decoder.decoder.2.{kind}" for kind in ("weight", "bias")},
}
"""Parameter here → of the 16 kHz model there."""


class FrameModel(torch.nn.Module):
    """One frame and the state before it: probability of speech, and the state after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = torch.nn.Conv1d(1, 2 * BINS, 256, stride=128, bias=False)
        self.conv1 = torch.nn.Conv1d(BINS, 128, 3, padding=1)
        self.conv2 = torch.nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = torch.nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = torch.nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = torch.nn.LSTMCell(128, 128)
        self.final_conv = torch.nn.Conv1d(128, 1, 1)

    def forward(
        self, samples: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """samples [B, 576], state (h, c) each [B, 128] → probability [B, 1], state."""
        x = torch.nn.functional.pad(samples[:, None], (0, PAD), mode="reflect")
        x = self.stft_conv(x)
        x = torch.sqrt(x[:, :BINS] ** 2 + x[:, BINS:] ** 2)
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = torch.relu(conv(x))
        h, c = self.lstm_cell(x.squeeze(-1), state)
        return torch.sigmoid(self.final_conv(torch.relu(h)[..., None])).mean(dim=2), (h, c)


class SileroVAD(torch.nn.Module):
    """Audio [B, samples], a multiple of 512 → probability of speech [B, frames]."""

    def __init__(self) -> None:
        super().__init__()
        self.frame = FrameModel()

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(audio, (CONTEXT, 0))
        state = (audio.new_zeros(len(audio), 128), audio.new_zeros(len(audio), 128))
        found = []
        for start in range(0, audio.shape[1], FRAME):
            probability, state = self.frame(padded[:, start : start + CONTEXT + FRAME], state)
            found.append(probability)
        return torch.cat(found, dim=1)


def load(folder: Path) -> tuple[torch.nn.Module, dict[str, dict[str, torch.Tensor]]]:
    theirs = torch.jit.load(folder / "data" / "silero_vad.jit", map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
    model = SileroVAD()
    model.frame.load_state_dict({mine: theirs[f"_model.{name}"] for mine, name in NAMES.items()})
    return model, {
        "second": {"audio": 0.1 * torch.randn(1, 31 * FRAME)},
        "calls": {"audio": 0.1 * torch.randn(8, 62 * FRAME)},
    }
