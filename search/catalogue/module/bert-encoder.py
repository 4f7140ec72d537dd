"""The layers of a BERT-like encoder as one list of library calls over buffers of their own, with the same bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hotpass import part


@part(
    engine="module",
    claims=["**"],
    replaces="BertEncoder",
    numerics="bit-identical",
    reload="reweight",
    device="cpu",
)
class BertEncoder:
    """The same products, activations and norms, without what lies between them: results go into buffers that stay (a batch of sequences
    takes fresh pages for megabytes at each product otherwise), activation and sums are in place, and a mask of booleans becomes one of
    numbers once instead of in every layer. Query, key and value are one product, and matrices are laid out once, where that gives the same
    bits: at the install each is tried on random numbers beside the layer's own product, and all of it beside the encoder. It will not
    help much where products alone are the time, since those are the library's own.
    """

    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        config = ctx.config
        known = {
            "_attn_implementation": "sdpa",
            "is_decoder": False,
            "hidden_act": "gelu",
            "chunk_size_feed_forward": 0,
        }
        for name, value in known.items():
            if getattr(config, name, value) != value:
                raise ValueError(f"bert-encoder knows {name}={value!r} only")
        self.heads, self.eps = config.num_attention_heads, config.layer_norm_eps
        self.layers = [_Layer(ctx.weights, f"layer.{index}.") for index in range(config.num_hidden_layers)]
        self.reference, self.plans = ctx.reference(), {}

    def forward(self, hidden_states, attention_mask=None, encoder_hidden_states=None, **kwargs):
        if encoder_hidden_states is not None or kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            raise ValueError("bert-encoder has neither a cache nor cross attention")
        key = (hidden_states.shape, None if attention_mask is None else attention_mask.dtype)
        if key not in self.plans:
            self.plans[key] = self._planned(hidden_states.shape, attention_mask)
        return _answer(self.plans[key].run(hidden_states, attention_mask))

    def close(self):
        self.plans.clear()

    def _planned(self, shape, attention_mask):
        """The first way whose every bit is the encoder's on random numbers. Raises ValueError without any."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        expected = self.reference(x, attention_mask).last_hidden_state
        for fused in (True, False):
            plan = _Plan(self.layers, self.heads, self.eps, shape, fused)
            if _equal(plan.run(x, attention_mask), expected):
                return plan
        raise ValueError(f"bert-encoder: no way to the encoder's bits is known here for {tuple(shape)}")


class _Layer:
    """Weights of a layer by their place in it."""

    def __init__(self, w, prefix):
        self.qkv = [
            (w[f"{prefix}attention.self.{name}.weight"], w[f"{prefix}attention.self.{name}.bias"])
            for name in ("query", "key", "value")
        ]
        self.mixed, self.mixed_norm = (
            _pair(w, f"{prefix}attention.output.dense"),
            _pair(w, f"{prefix}attention.output.LayerNorm"),
        )
        self.up, self.down = _pair(w, f"{prefix}intermediate.dense"), _pair(w, f"{prefix}output.dense")
        self.norm = _pair(w, f"{prefix}output.LayerNorm")


class _Plan:
    """One way for one shape: products, and the buffers that they write."""

    def __init__(self, layers, heads, eps, shape, fused):
        self.shape, self.heads, self.eps, self.layers = shape, heads, eps, layers
        rows, width = shape[0] * shape[1], shape[2]
        inner = torch.empty(rows, layers[0].up[0].shape[0])
        out = torch.empty(rows, width)
        qkv = torch.empty(rows, 3 * width) if fused else torch.empty(3, rows, width)
        self.products = []
        for layer in layers:
            if fused:
                given = [_product(*(torch.cat(item) for item in zip(*layer.qkv, strict=True)), qkv)]
            else:
                given = [_product(*pair, qkv[index]) for index, pair in enumerate(layer.qkv)]
            self.products.append(
                (given, _product(*layer.mixed, out), _product(*layer.up, inner), _product(*layer.down, out))
            )
        self.fused = fused

    def run(self, hidden_states, attention_mask):
        batch, length, width = self.shape
        mask = attention_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill_(mask.logical_not(), float("-inf"))
        x = hidden_states.view(batch * length, width)
        for layer, (given, mixed, up, down) in zip(self.layers, self.products, strict=True):
            found = [product(x) for product in given]
            parts = found[0].chunk(3, 1) if self.fused else found
            q, k, v = (item.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for item in parts)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(-1, width)
            x = F.layer_norm(mixed(attended).add_(x), (width,), *layer.mixed_norm, self.eps)
            inner = torch.ops.aten.gelu_(up(x))
            x = F.layer_norm(down(inner).add_(x), (width,), *layer.norm, self.eps)
        return x.view(self.shape)


def _product(weight, bias, out):
    """What a linear layer computes, for as many rows as `out` has: over a matrix that the library laid out once if it sums it alike, else
    into `out`."""
    rows, turned = len(out), weight.t()

    def plain(x):
        return torch.addmm(bias, x, turned, out=out)

    if not torch.backends.mkl.is_available():
        return plain
    laid_out = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)

    def packed(x):
        return torch.ops.mkl._mkl_linear(x, laid_out, weight, bias, rows)

    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
    return packed if _equal(packed(x), F.linear(x, weight, bias)) else plain


def _equal(a, b):
    """Bit for bit."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _pair(w, name):
    return w[f"{name}.weight"], w[f"{name}.bias"]


def _answer(hidden_states):
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)
