"""A whole layer written out, with its attention and feed-forward kept."""

from hotpass import part


@part(
    engine="decoder",
    claims=["model.layers.*"],
    keeps=["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"],
    replaces="LlamaDecoderLayer",
)
class KeptChildren:
    """Only the residual stream is its own."""

    def prepare(self, ctx, params):
        self.attention, self.mlp = ctx.kept("self_attn"), ctx.kept("mlp")
        self.before, self.after = ctx.kept("input_layernorm"), ctx.kept("post_attention_layernorm")

    def forward(self, hidden_states, **kwargs):
        hidden = hidden_states + self.attention(hidden_states=self.before(hidden_states), **kwargs)[0]
        return hidden + self.mlp(self.after(hidden))
