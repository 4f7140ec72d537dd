"""The whole model written out flat in PyTorch, its matrices in the CPU libraries' own packed layouts."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hotpass import part


@part(
    engine="decoder",
    claims=["model"],
    params={"storage": ["float32", "float16", "int8"]},
    numerics="tolerance",
    numerics_when={"storage=float16,dtype=float32": "lossy", "storage=int8": "lossy"},
    reload="reweight",
    device="cpu",
    requires=["family:llama", "isa:avx2"],
)
class LeanPrepacked:
    """The flat forward of `lean-model` over matrices that were laid out once for the library's kernels, which a plain product redoes, or does
    without, at every call: with two to thirty rows (a batch, or a short prefill) that is much of its time. `float16` halves the bytes and
    keeps activations and sums in float32: the values of a bfloat16 model fit in float16 after one exact scaling for each matrix, so there
    it is no narrowing. `int8` has a quarter of the bytes, one scale for each row, and rounds activations to 8 bits over the whole
    batch, so a sequence's result depends on its neighbours. At batch 1 `float32` gains little over `lean-model`, and long prefill is
    faster by plain products. The packed matrices are private memory of the engine's process, a second copy of the model.
    """

    def weights(self, w, params):
        made = {"embed": w["model.embed_tokens.weight"], "norm": w["model.norm.weight"].float()}
        made |= _stored("head", [w["lm_head.weight"]], params["storage"])
        for index in range(sum(name.endswith(".input_layernorm.weight") for name in w)):
            at = f"model.layers.{index}."
            made[f"{index}.attention_norm"] = w[at + "input_layernorm.weight"].float()
            made[f"{index}.mlp_norm"] = w[at + "post_attention_layernorm.weight"].float()
            for name, parts in _MATRICES.items():
                made |= _stored(f"{index}.{name}", [w[f"{at}{part}.weight"] for part in parts], params["storage"])
        return made

    def prepare(self, ctx, params):
        config, w = ctx.config, ctx.weights
        _check(config, ctx.settings, "lean-prepacked")
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.scale, self.eps = config.head_dim**-0.5, config.rms_norm_eps
        self.embed, self.norm, self.head = w["embed"], w["norm"], _packed(w, "head", params["storage"])
        self.layers = [
            SimpleNamespace(
                attention_norm=w[f"{index}.attention_norm"],
                mlp_norm=w[f"{index}.mlp_norm"],
                **{name: _packed(w, f"{index}.{name}", params["storage"]) for name in _MATRICES},
            )
            for index in range(config.num_hidden_layers)
        ]
        self.cos, self.sin = _rotary_tables(config, ctx.kv.max_context, ctx.device, torch.float32)

    def close(self):
        self.layers, self.head = [], None

    @torch.inference_mode()
    def forward(self, batch, kv):
        """Logits float32 [num_seqs, vocab] of the last token of each sequence."""
        plan = _plan(batch, self.embed.device)
        x = self.embed[batch.tokens].float()
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, x.shape[1:], layer.attention_norm, self.eps)
            mixed = self._attend(layer.qkv(h), cos, sin, kv.keys(index), kv.values(index), plan)
            x.add_(layer.o(mixed))
            h = F.rms_norm(x, x.shape[1:], layer.mlp_norm, self.eps)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x.add_(layer.down(F.silu(gate).mul_(up)))
        last = x if batch.query_tokens == batch.num_seqs else x[batch.seq_starts[1:] - 1]
        return self.head(F.rms_norm(last, x.shape[1:], self.norm, self.eps))

    def _attend(self, qkv, cos, sin, keys, values, plan):
        """qkv [T, (heads + 2 * kv_heads) * head_dim] → [T, heads * head_dim]; stores keys and values on the way."""
        heads, kv_heads, head_dim = self.shape
        qkv = qkv.view(qkv.shape[0], -1, head_dim)
        rotated, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        rotated = torch.addcmul(rotated * cos, rotated.roll(head_dim // 2, dims=-1), sin)
        q, k = rotated[:, :heads], rotated[:, heads:]
        outs = []
        for item in plan:
            rows, length = slice(item.start, item.stop), item.context + item.tokens
            slots = slice(item.slot, item.slot + item.count)
            keys[slots, :, item.context : length] = (
                k[rows].view(item.count, item.tokens, kv_heads, head_dim).transpose(1, 2)
            )
            values[slots, :, item.context : length] = (
                v[rows].view(item.count, item.tokens, kv_heads, head_dim).transpose(1, 2)
            )
            seen_k, seen_v = (_typed(cache[slots, :, :length], q) for cache in (keys, values))
            if item.tokens == 1:  # heads that share keys are rows of one product
                grouped = q[rows].reshape(item.count, kv_heads, heads // kv_heads, head_dim)
                out = F.scaled_dot_product_attention(grouped, seen_k, seen_v, scale=self.scale)
            else:
                out = _causal(q[rows], seen_k[0], seen_v[0], item, self.scale)
            outs.append(out.reshape(item.stop - item.start, heads * head_dim))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _causal(q, k, v, item, scale):
    """q [t, heads, head_dim], k and v [kv_heads, length, head_dim] → [t, heads, head_dim]; token i sees itself and what is before."""
    tokens, heads, head_dim = q.shape
    groups = heads // k.shape[0]
    # Key heads are the batch, the queries that share one its heads: an expanded view, nothing is repeated in memory.
    k, v = (cache[:, None].expand(-1, groups, -1, -1) for cache in (k, v))
    q = q.view(tokens, -1, groups, head_dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=item.mask, is_causal=item.mask is None, scale=scale)
    return out.permute(2, 0, 1, 3)


def _plan(batch, device):
    """Rows that attend in one call: decoding neighbours in consecutive slots with equal contexts, else one sequence each."""
    plan = []
    starts = batch.host_seq_starts
    for index, (slot, context) in enumerate(zip(batch.host_slots, batch.host_contexts, strict=True)):
        start, stop = starts[index], starts[index + 1]
        before = plan[-1] if plan else None
        if (
            before is not None
            and stop - start == before.tokens == 1
            and (before.context, before.slot + before.count) == (context, slot)
        ):
            before.count += 1
            before.stop = stop
            continue
        tokens = stop - start
        mask = None
        if tokens > 1 and context:
            mask = torch.ones(tokens, context + tokens, dtype=torch.bool, device=device).tril(context)
        plan.append(
            SimpleNamespace(start=start, stop=stop, slot=slot, count=1, tokens=tokens, context=context, mask=mask)
        )
    return plan


def _typed(cache, like):
    return cache if cache.dtype == like.dtype else cache.to(like.dtype)


def _check(config, settings, name):
    if config.attention_bias or config.mlp_bias or config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"{name} knows Llama without biases and with SiLU only")
    if config.rope_parameters["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"{name} does not know rotary type {config.rope_parameters['rope_type']}")
    if settings.get("cuda_graphs"):
        raise ValueError(f"{name} reads lengths on the host and cannot be captured; set cuda_graphs to False")


def _rotary_tables(config, positions, device, dtype):
    """cos and sin [positions, 1, head_dim]; sin with the sign of the rotated half, so that a roll replaces negation."""
    rotary = LlamaRotaryEmbedding(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rotary.inv_freq.float().cpu())
    cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tuple(table[:, None].to(device, dtype) for table in tables)


_MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _stored(name, matrices, storage):
    """The tensors that a builder keeps for one (fused) matrix [out, in]."""
    weight = (matrices[0] if len(matrices) == 1 else torch.cat(matrices)).float()
    if storage == "float16":  # a power of two brings the largest value near 2**15, so that small ones keep their bits
        shift = 2.0 ** (14 - torch.frexp(weight.abs().amax().clamp_min(1e-30)).exponent.double())
        return {name: (weight * shift.float()).to(torch.float16), f"{name}.scale": (1 / shift).float()}
    if storage == "int8":
        scale = (weight.abs().amax(dim=1) / 127).clamp_min(1e-30)
        return {name: (weight / scale[:, None]).round().to(torch.int8), f"{name}.scale": scale}
    return {name: weight}


def _packed(w, name, storage):
    """A function of float32 [rows, in] → float32 [rows, out] over the library's layout of the matrix."""
    weight = w[name]
    if storage == "float16":
        packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        scale = float(w[f"{name}.scale"])
        return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed).mul_(scale)
    if storage == "int8":
        with warnings.catch_warnings():  # the tensor type is deprecated, the packed product over it is not
            warnings.simplefilter("ignore", UserWarning)
            zero = torch.zeros(weight.shape[0], dtype=torch.int64)
            typed = torch._make_per_channel_quantized_tensor(weight, w[f"{name}.scale"].double(), zero, 0)
            packed = torch.ops.quantized.linear_prepack(typed, None)
        # Without VNNI, pairs of products of two full 8-bit numbers overflow 16 bits: activations then have 7 bits.
        reduced = not torch.cpu._is_vnni_supported()
        return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduced)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
