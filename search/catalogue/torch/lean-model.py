"""The whole model written out flat in PyTorch: no modules, fused projections, grouped attention over the KV slots."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hotpass import part


@part(
    engine="decoder",
    claims=["model"],
    params={"storage": ["loaded", "bfloat16"]},
    numerics="tolerance",
    reload="reweight",
    numerics_when={"storage=bfloat16,dtype=float32": "lossy", "storage=bfloat16,dtype=float16": "lossy"},
    requires=["family:llama"],
)
class LeanModel:
    """A module tree spends most of a small model's decode step in Python and in small operations: this does a layer in about twenty calls, with
    one product for query, key and value, one for gate and up, rotary embedding from a table, and keys read in place. The residual
    stream stays float32 whatever the storage, so that on a bfloat16 model it is nearer to the reference than the loaded forward. It will
    not help where the step is bound by the bytes of its weights (a large model on a CPU at batch 1), except with bfloat16 storage, which
    halves them; and long prefill is bound by the same products as before. Lengths are read on the host, so it cannot be captured in a
    CUDA graph. A layer's three and two fused matrices are second copies in memory.
    """

    def weights(self, w, params):
        narrow = params["storage"] == "bfloat16"

        def stored(*names):
            tensor = w[names[0]] if len(names) == 1 else torch.cat([w[name] for name in names])
            return tensor.to(torch.bfloat16) if narrow else tensor

        made = {
            "embed": stored("model.embed_tokens.weight"),
            "head": stored("lm_head.weight"),
            "norm": w["model.norm.weight"].float(),
        }
        for index in range(_num_layers(w)):
            at = f"model.layers.{index}."
            made |= {
                f"{index}.attention_norm": w[at + "input_layernorm.weight"].float(),
                f"{index}.qkv": stored(*(f"{at}self_attn.{name}_proj.weight" for name in "qkv")),
                f"{index}.o": stored(at + "self_attn.o_proj.weight"),
                f"{index}.mlp_norm": w[at + "post_attention_layernorm.weight"].float(),
                f"{index}.gate_up": stored(at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"),
                f"{index}.down": stored(at + "mlp.down_proj.weight"),
            }
        return made

    def prepare(self, ctx, params):
        config, w = ctx.config, ctx.weights
        _check(config, ctx.settings, "lean-model")
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.scale, self.eps = config.head_dim**-0.5, config.rms_norm_eps
        self.embed, self.head, self.norm = w["embed"], w["head"], w["norm"]
        names = ("attention_norm", "qkv", "o", "mlp_norm", "gate_up", "down")
        self.layers = [
            SimpleNamespace(**{name: w[f"{index}.{name}"] for name in names})
            for index in range(config.num_hidden_layers)
        ]
        self.cos, self.sin = _rotary_tables(config, ctx.kv.max_context, ctx.device, self.embed.dtype)

    @torch.inference_mode()
    def forward(self, batch, kv):
        """Logits float32 [num_seqs, vocab] of the last token of each sequence."""
        plan = _plan(batch, self.embed.device)
        x = self.embed[batch.tokens].float()
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, x.shape[1:], layer.attention_norm, self.eps)
            mixed = self._attend(_linear(h, layer.qkv), cos, sin, kv.keys(index), kv.values(index), plan)
            x.add_(_linear(mixed, layer.o))
            h = F.rms_norm(x, x.shape[1:], layer.mlp_norm, self.eps)
            gate, up = _linear(h, layer.gate_up).chunk(2, dim=-1)
            x.add_(_linear(F.silu(gate).mul_(up), layer.down))
        last = x if batch.query_tokens == batch.num_seqs else x[batch.seq_starts[1:] - 1]
        return _linear(F.rms_norm(last, x.shape[1:], self.norm, self.eps), self.head).float()

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


def _linear(x, weight):
    return F.linear(x.to(weight.dtype), weight)


def _num_layers(w):
    return sum(name.endswith(".input_layernorm.weight") for name in w)
