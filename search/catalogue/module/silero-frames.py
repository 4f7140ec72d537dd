"""Silero VAD over a whole recording: every frame through the convolutions at once, then one recurrent pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hotpass import part

FRAME, CONTEXT, PAD, BINS = 512, 64, 64, 129
"""Samples of a frame, before it, mirrored behind it; frequencies."""


@part(
    engine="module",
    claims=["model"],
    numerics="tolerance",
    reload="reweight",
    requires=["architecture:SileroVAD"],
)
class SileroFrames:
    """Frames depend on one another only through the LSTM, so spectrum and convolutions of all of them are one batch, and the LSTM's product
    with its inputs is one product; what is left of the loop is the recurrence, in one call of the library. A convolution over many
    frames sums in another order than over one. It will not help a live stream, which has one frame at a time.
    """

    def weights(self, w, params):
        return {name.removeprefix("frame."): tensor for name, tensor in w.items()}

    def prepare(self, ctx, params):
        self.w = ctx.weights
        self.cell = [self.w[f"lstm_cell.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

    def forward(self, audio):
        w, batch = self.w, len(audio)
        x = F.pad(audio, (CONTEXT, 0)).unfold(1, FRAME + CONTEXT, FRAME)
        frames = x.shape[1]
        x = torch.cat((x, x[..., -PAD - 1 : -1].flip(-1)), dim=-1).reshape(batch * frames, 1, -1)
        x = F.conv1d(x, w["stft_conv.weight"], stride=128)
        x = torch.sqrt(x[:, :BINS] ** 2 + x[:, BINS:] ** 2)
        for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 2), ("conv4", 1)):
            x = torch.relu(F.conv1d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=stride, padding=1))
        start = x.new_zeros(1, batch, 128)
        h, _, _ = torch.lstm(x.view(batch, frames, 128), (start, start), self.cell, True, 1, 0.0, False, False, True)
        logits = F.linear(torch.relu(h), w["final_conv.weight"][:, :, 0], w["final_conv.bias"])
        return torch.sigmoid(logits)[..., 0]
