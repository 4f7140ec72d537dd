"""Parts to start from: for each kind of slot a runnable part that computes what the reference does, from its own weights.

Kinds that are written out here are those of Llama-like trees. Any other slot gets a part that calls the reference, with the
reference's source below it to replace it with.
"""

from __future__ import annotations

from engines.decoder.reference import Net
from engines.decoder.slots import WHOLE, reference_source, slot_modules
from engines.starting import OWN_NORM, OWN_WEIGHTS, REFERENCE, starting_part, with_reference
from hotpass.errors import InputError, nearest

_LINEAR = """
    def forward(self, input):
        return F.linear(input, self.w["weight"], self.w.get("bias"))
"""

_EMBEDDING = """
    def forward(self, input):
        return F.embedding(input, self.w["weight"])
"""

_NORM_FUNCTION = """

def rms_norm(x, weight, eps):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
"""

_NORM = """
    def forward(self, hidden_states):
        return rms_norm(hidden_states, self.w["weight"], self.eps)
"""

_MLP = """
    def forward(self, x):
        gate = F.linear(x, self.w["gate_proj.weight"], self.w.get("gate_proj.bias"))
        up = F.linear(x, self.w["up_proj.weight"], self.w.get("up_proj.bias"))
        return F.linear(F.silu(gate) * up, self.w["down_proj.weight"], self.w.get("down_proj.bias"))
"""

_ATTEND_FUNCTIONS = '''

def rotate(x, cos, sin):
    """x [T, heads, D]; cos and sin [T, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q, k, v, keys, values, batch):
    """Write this step's k and v [T, kv_heads, D] to (slot, position), then attend sequence by sequence: [T, heads, D]."""
    out = torch.empty_like(q)
    for index in range(batch.num_seqs):
        start, end = batch.host_seq_starts[index], batch.host_seq_starts[index + 1]
        slot, context = batch.host_slots[index], batch.host_contexts[index]
        length = context + end - start
        keys[slot, :, context:length] = k[start:end].transpose(0, 1)
        values[slot, :, context:length] = v[start:end].transpose(0, 1)
        seen = torch.ones(end - start, length, dtype=torch.bool, device=q.device).tril(context)
        attended = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            keys[slot : slot + 1, :, :length].to(q.dtype),
            values[slot : slot + 1, :, :length].to(q.dtype),
            attn_mask=seen,
            enable_gqa=True,
        )
        out[start:end] = attended[0].transpose(0, 1)
    return out
'''

_ATTENTION = """
    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        self.w, self.step, self.layer = ctx.weights, ctx.step, ctx.layer
        self.eps = getattr(ctx.config, "rms_norm_eps", None)

    def projected(self, name, x, head_dim):
        heads = F.linear(x, self.w[f"{name}_proj.weight"], self.w.get(f"{name}_proj.bias")).view(len(x), -1, head_dim)
        norm = self.w.get(f"{name}_norm.weight")
        return heads if norm is None else rms_norm(heads, norm, self.eps)

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        batch, kv = self.step.batch, self.step.kv
        keys, values = kv.keys(self.layer), kv.values(self.layer)
        x = hidden_states[0]
        q, k, v = (self.projected(name, x, keys.shape[-1]) for name in ("q", "k", "v"))
        cos, sin = (each[0][:, None] for each in position_embeddings)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, keys, values, batch)
        return F.linear(out.flatten(1), self.w["o_proj.weight"], self.w.get("o_proj.bias"))[None], None
"""

_LAYER = """
    def weights(self, w, params):
        return {name: w[f"{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm")}

    def prepare(self, ctx, params):
        self.w, self.eps = ctx.weights, ctx.config.rms_norm_eps
        self.attention, self.mlp = ctx.kept("self_attn"), ctx.kept("mlp")

    def forward(self, hidden_states, **kwargs):
        normed = rms_norm(hidden_states, self.w["input_layernorm"], self.eps)
        hidden = hidden_states + self.attention(hidden_states=normed, **kwargs)[0]
        return hidden + self.mlp(rms_norm(hidden, self.w["post_attention_layernorm"], self.eps))
"""

_MODEL = """
    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        self.w, self.eps, self.layers = ctx.weights, ctx.config.rms_norm_eps, ctx.config.num_hidden_layers
        head_dim = ctx.kv.keys(0).shape[-1]
        theta = ctx.config.rope_parameters["rope_theta"]
        self.frequencies = (1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)).to(ctx.device)

    def linear(self, name, x):
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def forward(self, batch, kv):
        x = F.embedding(batch.tokens, self.w["model.embed_tokens.weight"])
        angles = torch.outer(batch.positions.float(), self.frequencies).repeat(1, 2)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            normed = rms_norm(x, self.w[f"{at}.input_layernorm.weight"], self.eps)
            x = x + self.attention(f"{at}.self_attn", normed, cos, sin, batch, kv.keys(layer), kv.values(layer))
            normed = rms_norm(x, self.w[f"{at}.post_attention_layernorm.weight"], self.eps)
            gated = F.silu(self.linear(f"{at}.mlp.gate_proj", normed)) * self.linear(f"{at}.mlp.up_proj", normed)
            x = x + self.linear(f"{at}.mlp.down_proj", gated)
        last = rms_norm(x[batch.seq_starts[1:] - 1], self.w["model.norm.weight"], self.eps)
        return self.linear("lm_head", last).float()

    def attention(self, at, x, cos, sin, batch, keys, values):
        q, k, v = (self.projected(at, name, x, keys.shape[-1]) for name in ("q", "k", "v"))
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, keys, values, batch)
        return self.linear(f"{at}.o_proj", out.flatten(1))

    def projected(self, at, name, x, head_dim):
        heads = self.linear(f"{at}.{name}_proj", x).view(len(x), -1, head_dim)
        norm = self.w.get(f"{at}.{name}_norm.weight")
        return heads if norm is None else rms_norm(heads, norm, self.eps)
"""

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are written out here."""


def part_template(net: Net, slot: str) -> str:
    """Text of `part.py` for a slot, claiming it in every layer. Raises InputError for an unknown slot."""
    modules = slot_modules(net)
    if slot != WHOLE and slot not in modules:
        raise InputError("slot", slot, "is not in the slot table", nearest(slot, [WHOLE, *modules])[:300])
    stands_for = "" if slot == WHOLE else type(modules[slot]).__name__
    body, functions, keeps = _body(net, slot, stands_for)
    text = starting_part(slot, body, engine="decoder", stands_for=stands_for, keeps=keeps) + functions
    return with_reference(text, reference_source(net, slot)) if body is REFERENCE else text


def _body(net: Net, slot: str, stands_for: str) -> tuple[str, str, tuple[str, ...]]:
    """(methods, functions below the class, kept children) of the kind that the slot is."""
    config = net.config
    plain = config.model_type in _FAMILIES and getattr(config, "hidden_act", "") == "silu" and net.ragged
    default_rope = plain and config.rope_parameters.get("rope_type", "default") == "default"
    if stands_for == "Linear":
        return OWN_WEIGHTS + _LINEAR, "", ()
    if stands_for == "Embedding":
        return OWN_WEIGHTS + _EMBEDDING, "", ()
    if plain and stands_for.endswith("RMSNorm"):
        return OWN_NORM + _NORM, _NORM_FUNCTION, ()
    if plain and stands_for.endswith("MLP"):
        return OWN_WEIGHTS + _MLP, "", ()
    if plain and stands_for.endswith("Attention"):
        return _ATTENTION, _NORM_FUNCTION + _ATTEND_FUNCTIONS, ()
    if plain and stands_for.endswith("DecoderLayer"):
        return _LAYER, _NORM_FUNCTION, ("self_attn", "mlp")
    if default_rope and slot == WHOLE:
        return _MODEL, _NORM_FUNCTION + _ATTEND_FUNCTIONS, ()
    return REFERENCE, "", ()
