"""Silero VAD over a whole recording with the very bits of frame after frame: a stage at a time, each by the call that keeps them."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F

from hotpass import part

FRAME, CONTEXT, PAD, BINS, WIDTH = 512, 64, 64, 129, 128
"""Samples of a frame, before it, mirrored behind it; frequencies; width of the state."""
CONVS = (("stft_conv", 128, 0), ("conv1", 1, 1), ("conv2", 2, 1), ("conv3", 2, 1), ("conv4", 1, 1))
"""Name, stride, padding."""
WARM_CALLS = 3
"""TorchScript specialises its plan over the first calls."""


@part(
    engine="module",
    claims=["model"],
    numerics="bit-identical",
    reload="reweight",
    device="cpu",
    requires=["architecture:SileroVAD"],
)
class SileroStages:
    """Frames depend on one another only through the LSTM: what comes before and after it is one call for all frames, and what is left of
    the loop is the recurrence, recorded once as a list of operators. Which call sums a frame as it is summed alone depends on library,
    shape and threads (one recording at a time is a matrix product a frame, several are the CPU library's own convolution). So at the
    install each stage tries its calls on random audio beside frames one by one, and keeps the first whose every bit is equal. It will
    not help a live stream, which has one frame at a time.
    """

    def weights(self, w, params):
        return {name.removeprefix("frame."): tensor for name, tensor in w.items()}

    def prepare(self, ctx, params):
        self.w, self.reference = ctx.weights, ctx.reference()
        self.recorded = {}

    def forward(self, audio):
        if audio.shape not in self.recorded:
            self.recorded[audio.shape] = self._recorded(audio.shape)
        return self.recorded[audio.shape](audio, *self.w.values())

    def close(self):
        self.recorded.clear()
        self.w = None

    def _recorded(self, shape):
        """The forward for one shape of audio as a list of operators, equal in every bit on random audio. Raises ValueError if it is not."""
        audio = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
        names, weights = list(self.w), tuple(self.w.values())
        chosen = self._chosen(audio)

        def whole(audio, *weights):
            return _run(audio, dict(zip(names, weights, strict=True)), chosen.__getitem__)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer warns of every shape that it freezes, which is what is wanted
            # Weights are inputs: torch keeps what was traced for good, and with constants the memory that they lie in.
            replay = torch.jit.trace(whole, (audio, *weights), check_trace=False)
        for _ in range(WARM_CALLS):
            found = replay(audio, *weights)
        if not _equal(found, self.reference(audio)):
            raise ValueError(
                f"silero-stages: for audio {tuple(shape)} no way to the bits of frame after frame is known here"
            )
        return replay

    def _chosen(self, audio):
        """Stage → (which of its calls, whether at once): the first that gives on this audio what frames one by one give."""
        chosen, batch = {}, len(audio)

        def settle(name, calls, x):
            tried = _many_like(x, batch) if name == "sigmoid" else x
            expected = _one_by_one(calls[0], tried, batch)
            equal = (index for index, call in enumerate(calls) if _equal(call(tried), expected))
            index = next(equal, None)
            chosen[name] = (0, False) if index is None else (index, True)
            return expected[: len(x)]

        _run(audio, self.w, settle=settle)
        return chosen


def _run(audio, w, choice=None, settle=None):
    """`choice`: stage → (which of its calls, whether at once); or `settle`, which computes a stage and settles that."""
    batch = len(audio)

    def stage(name, calls, x):
        if settle is not None:
            return settle(name, calls, x)
        index, at_once = choice(name)
        return calls[index](x) if at_once else _one_by_one(calls[index], x, batch)

    x = _frames(audio)
    for name, stride, padding in CONVS:
        x = stage(name, _convolutions(w[f"{name}.weight"], w.get(f"{name}.bias"), stride, padding), x)
        x = torch.sqrt(x[:, :BINS] ** 2 + x[:, BINS:] ** 2) if name == "stft_conv" else torch.relu_(x)
    given = stage("gates", _linears(w["lstm_cell.weight_ih"], w["lstm_cell.bias_ih"], batch), x[..., 0])
    hidden = _recurrence(given.view(-1, batch, 4 * WIDTH), w["lstm_cell.weight_hh"], w["lstm_cell.bias_hh"])
    hidden = torch.relu_(hidden).view(-1, WIDTH, 1)
    logits = stage("final_conv", _convolutions(w["final_conv.weight"], w["final_conv.bias"], 1, 0), hidden)
    return stage("sigmoid", [torch.sigmoid, _spread_sigmoid], logits[:, 0, 0]).view(-1, batch).t().contiguous()


def _frames(audio):
    """audio [B, samples] → frames with what is before and behind them [frames * B, 1, 640], in the order of time."""
    x = F.pad(audio, (CONTEXT, 0)).unfold(1, FRAME + CONTEXT, FRAME).transpose(0, 1)
    return torch.cat((x, x[..., -PAD - 1 : -1].flip(-1)), dim=-1).view(-1, 1, CONTEXT + FRAME + PAD)


def _convolutions(weight, bias, stride, padding):
    """The usual call, and a matrix product an item, which the usual call is for a single item."""
    kernel = (1, weight.shape[-1])

    def usual(x):
        return F.conv1d(x, weight, bias, stride=stride, padding=padding)

    def products(x):
        wide = weight.unsqueeze(2)
        return torch.ops.aten.thnn_conv2d(x.unsqueeze(2), wide, kernel, bias, (1, stride), (0, padding)).squeeze(2)

    return [usual, products]


def _linears(weight, bias, batch):
    """The usual call, and a matrix product a frame."""

    def products(x):
        frames = x.reshape(-1, batch, x.shape[-1])
        turned = weight.t().expand(len(frames), *weight.t().shape)
        return torch.baddbmm(bias.expand(len(frames), batch, -1), frames, turned).view(len(x), -1)

    return [lambda x: F.linear(x, weight, bias), products]


def _recurrence(given, weight, bias):
    """given [frames, B, 4 * WIDTH]: the inputs' share of the gates → hidden states [frames, B, WIDTH], as torch's LSTM cell has them."""
    h = c = given.new_zeros(given.shape[1], WIDTH)
    found = []
    for inputs in given.unbind(0):
        gates = F.linear(h, weight, bias).add_(inputs)
        i, f = gates[:, : 2 * WIDTH].sigmoid_().chunk(2, 1)
        g, o = gates[:, 2 * WIDTH : 3 * WIDTH].tanh_(), gates[:, 3 * WIDTH :].sigmoid_()
        c = (f * c).add_(i * g)
        h = o * c.tanh()
        found.append(h)
    return torch.stack(found)


def _spread_sigmoid(x):
    """Values apart in memory take torch's loop over single values, as a call for a few values does."""
    apart = x.new_empty(len(x), 2)
    apart[:, 0] = x
    return torch.sigmoid(apart[:, 0])


def _many_like(x, batch):
    """x with some thousand values more: the two loops over values differ on one in a hundred."""
    more = 4 * torch.randn(4096 * batch, generator=torch.Generator().manual_seed(1))
    return torch.cat((x, more))


def _one_by_one(call, x, batch):
    """The call for each frame by itself."""
    return torch.cat([call(frame) for frame in x.split(batch)])


def _equal(a, b):
    """Bit for bit."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
