// The whole forward of a Llama-family decoder as one function: tokens in, logits of each sequence's last token out.
//
//   embed ─► per layer [ norm · q,k,v · rotary · KV write | attention | o · residual | norm · gate,up · SiLU | down · residual ] ─► norm · head
//            `|` is a barrier of the team; within a phase each thread has a fixed range of weight tiles, which it streams once
//
// Up to 8 tokens, weights are decoded in registers and used for all tokens at once; above, they are decoded once into cache
// panels. Results depend on the number of threads (attention is cut into shares), never on timing.
#include <vector>

#include "products.h"
#include "slot_attention.h"

namespace hp {
namespace {

struct Dims {
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, positions;
    int64_t narrow;  // 1: activations may be rounded to 8 bits (bfloat16 on the matrix unit)
    double eps;
};

struct Weights {
    const Matrix* matrices;  // q, k, v, o, gate, up, down for each layer; then head, embedding
    const float* norms;      // [2 · layers + 1][hidden]: input and post-attention norm of each layer, final norm
    const float* cosines;    // [positions][head_dim / 2]
    const float* sines;
};

enum Role { Q, K, VALUE, O, GATE, UP, DOWN, ROLES };

class Model {
  public:
    Model(const Dims& dims, const Weights& weights, const Cache& cache, int threads)
        : d_(dims), w_(weights), team_(threads),
          multiplier_(team_, std::max(std::max(d_.hidden, d_.intermediate), d_.heads * d_.head_dim), d_.narrow),
          attention_(team_, Heads{d_.heads, d_.kv_heads, d_.head_dim}, d_.positions, cache, d_.narrow) {}

    void step(const Batch& batch, float* logits) {
        b_ = batch;
        logits_ = logits;
        few_ = b_.num_tokens <= FEW;
        reserve(b_.num_tokens);
        attention_.begin(batch);
        team_.run([this](int thread) { forward(thread); });
    }

  private:
    const Matrix& matrix(int64_t layer, Role role) const { return w_.matrices[layer * ROLES + role]; }
    const Matrix& head() const { return w_.matrices[d_.layers * ROLES]; }
    const Matrix& embedding() const { return w_.matrices[d_.layers * ROLES + 1]; }
    int64_t from(int64_t units, int thread) const { return share(units, thread, team_.size()); }

    void reserve(int64_t tokens) {
        if (tokens <= capacity_) return;
        capacity_ = (tokens + GROUP - 1) / GROUP * GROUP;
        const auto size = [&](int64_t columns) { return static_cast<size_t>(capacity_ * columns); };
        residual_.resize(size(d_.hidden));
        gated_.resize(size(d_.intermediate));
        normed_.resize(size(std::max(d_.hidden, d_.heads * d_.head_dim)));
        multiplier_.reserve(capacity_);
    }

    void forward(int thread) {
        shape_tiles(b_.num_tokens);
        compute(thread);
        shape_tiles(0);
    }

    void compute(int thread) {
        embed(thread);
        team_.barrier();
        for (int64_t layer = 0; layer < d_.layers; layer++) {
            Grouped x = normalise(thread, w_.norms + 2 * layer * d_.hidden, b_.num_tokens, matrix(layer, Q), false);
            queries_keys_values(thread, layer, x);
            team_.barrier();
            x = attend(thread, layer);
            add_product(thread, matrix(layer, O), x);
            team_.barrier();
            x = normalise(thread, w_.norms + (2 * layer + 1) * d_.hidden, b_.num_tokens, matrix(layer, GATE), false);
            gate_up(thread, layer, x);
            team_.barrier();
            x = gated(layer);
            multiplier_.block_sums(thread, x, b_.num_tokens);
            if (thread == 0) attention_.begin_layer();
            add_product(thread, matrix(layer, DOWN), x);
            team_.barrier();
        }
        shape_tiles(b_.num_seqs);
        logits(thread);
    }

    // residual += matrix · x
    void add_product(int thread, const Matrix& m, const Grouped& x) {
        const auto add = [this](int64_t unit, int64_t token, const float* row) {
            float* to = residual_.data() + token * d_.hidden + unit * TILE;
            for (int lane = 0; lane < TILE; lane += LANES) vstore(to + lane, vload(to + lane) + vload(row + lane));
        };
        multiplier_.run(thread, b_.num_tokens, x, m.tiles(), 1, [&](int64_t unit) { return Place{&m, unit}; },
                 [&](int64_t unit, int64_t token, int tokens, const float* a, const float* b, int stride) {
                     for (int i = 0; i < tokens; i++) {
                         add(unit, token + i, a + i * stride);
                         if (b) add(unit + 1, token + i, b + i * stride);
                     }
                 });
    }

    // ---- phases -------------------------------------------------------------------------------------------------

    void embed(int thread) {
        const Matrix& e = embedding();
        for (int64_t t = from(b_.num_tokens, thread); t < from(b_.num_tokens, thread + 1); t++) {
            gather_row(e, b_.tokens[t], residual_.data() + t * d_.hidden);
        }
    }

    // RMS norm of each token (of each sequence's last, for the head), as products read it.
    Grouped normalise(int thread, const float* weight, int64_t count, const Matrix& reader, bool last_only) {
        const bool few = count <= FEW;
        const Grouped x{few ? multiplier_.few(thread) : normed_.data(), d_.hidden, multiplier_.group_of(count, reader)};
        const int64_t begin = few ? 0 : from(count, thread), end = few ? count : from(count, thread + 1);
        for (int64_t i = begin; i < end; i++) {
            const float* row = residual_.data() + (last_only ? b_.seq_starts[i + 1] - 1 : i) * d_.hidden;
            V squares = vzero();
            for (int64_t c = 0; c < d_.hidden; c += LANES) squares = vfma(vload(row + c), vload(row + c), squares);
            const float scale = 1.0f / std::sqrt(vsum(squares) / static_cast<float>(d_.hidden) + static_cast<float>(d_.eps));
            float* to = x.column(i, 0);
            if (x.group == 1)
                for (int64_t c = 0; c < d_.hidden; c += LANES) vstore(to + c, vload(row + c) * vset(scale) * vload(weight + c));
            else
                for (int64_t c = 0; c < d_.hidden; c++) to[c * x.group] = row[c] * scale * weight[c];
        }
        multiplier_.block_sums(thread, x, count);
        if (!few) team_.barrier();
        return x;
    }

    // A thread has whole heads, so that it can rotate what it has just computed.
    void queries_keys_values(int thread, int64_t layer, const Grouped& x) {
        const int64_t q = matrix(layer, Q).tiles(), k = matrix(layer, K).tiles(), per_head = d_.head_dim / TILE;
        const auto at = [&](int64_t unit) {
            if (unit < q) return Place{&matrix(layer, Q), unit};
            return unit < q + k ? Place{&matrix(layer, K), unit - q} : Place{&matrix(layer, VALUE), unit - q - k};
        };
        const auto keep = [&](int64_t unit, int64_t token, const float* row) {
            std::memcpy(attention_.row(token, unit / per_head) + unit % per_head * TILE, row, sizeof(float) * TILE);
        };
        multiplier_.run(thread, b_.num_tokens, x, q + 2 * k, per_head, at,
                 [&](int64_t unit, int64_t token, int tokens, const float* a, const float* b, int stride) {
                     for (int i = 0; i < tokens; i++) {
                         keep(unit, token + i, a + i * stride);
                         if (b) keep(unit + 1, token + i, b + i * stride);
                     }
                 });
        const int64_t heads = d_.heads + 2 * d_.kv_heads;
        for (int64_t head = from(heads, thread); head < from(heads, thread + 1); head++)
            for (int64_t t = 0; t < b_.num_tokens; t++) {
                const int64_t table = b_.positions[t] * d_.head_dim / 2;
                attention_.place_head(layer, head, t, w_.cosines + table, w_.sines + table);
            }
    }

    // Few tokens: each thread has all results, since each multiplies all of them.
    Grouped attend(int thread, int64_t layer) {
        const Grouped x{few_ ? multiplier_.few(thread) : normed_.data(), d_.heads * d_.head_dim,
                        multiplier_.group_of(b_.num_tokens, matrix(layer, O))};
        attention_.attend(thread, layer, few_, [&](int64_t token, int64_t head) { return Target{x.column(token, head * d_.head_dim), x.group}; });
        if (few_) multiplier_.block_sums(thread, x, b_.num_tokens);
        else team_.barrier();
        return x;
    }

    Grouped gated(int64_t layer) { return {gated_.data(), d_.intermediate, multiplier_.group_of(b_.num_tokens, matrix(layer, DOWN))}; }

    void gate_up(int thread, int64_t layer, const Grouped& x) {
        const Grouped to = gated(layer);
        multiplier_.run(thread, b_.num_tokens, x, 2 * matrix(layer, GATE).tiles(), 2,
                 [&](int64_t unit) { return Place{&matrix(layer, unit % 2 ? UP : GATE), unit / 2}; },
                 [&](int64_t unit, int64_t token, int tokens, const float* gate, const float* up, int stride) {
                     for (int i = 0; i < tokens; i++) {
                         alignas(64) float apart[TILE];
                         float* column = to.column(token + i, unit / 2 * TILE);
                         float* h = to.group == 1 ? column : apart;
                         for (int lane = 0; lane < TILE; lane += LANES)
                             vstore(h + lane, silu(vload(gate + i * stride + lane)) * vload(up + i * stride + lane));
                         if (to.group == 1) continue;
                         for (int lane = 0; lane < TILE; lane++) column[lane * to.group] = h[lane];
                     }
                 });
    }

    void logits(int thread) {
        const Grouped x = normalise(thread, w_.norms + 2 * d_.layers * d_.hidden, b_.num_seqs, head(), true);
        multiplier_.run(thread, b_.num_seqs, x, head().tiles(), 1, [&](int64_t unit) { return Place{&head(), unit}; },
                 [&](int64_t unit, int64_t seq, int seqs, const float* a, const float* b, int stride) {
                     for (int half = 0; half < (b ? 2 : 1); half++) {
                         const int64_t row = (unit + half) * TILE, rows = std::min<int64_t>(TILE, d_.vocab - row);
                         for (int i = 0; i < seqs; i++)
                             std::memcpy(logits_ + (seq + i) * d_.vocab + row, (half ? b : a) + i * stride, static_cast<size_t>(rows) * 4);
                     }
                 });
    }

    static void gather_row(const Matrix& m, int64_t row, float* to) {
        const uint8_t* tile = m.tile(row / TILE);
        const int sub = static_cast<int>(row % TILE) / LANES, lane = static_cast<int>(row % TILE) % LANES;
        with_decoder(m.format, [&](auto d) {
            using D = decltype(d);
            for (int64_t b = 0; b < m.blocks(); b++) {
                alignas(64) float values[BLOCK][LANES];
                const V scale = D::scale(tile, b, m.blocks(), sub), minimum = D::minimum(tile, b, m.blocks(), sub);
                D::codes(tile, b, sub, [&](V code, int k) { vstore(values[k], D::SCALED ? vfma(code, scale, minimum) : code); });
                for (int k = 0; k < BLOCK; k++) to[b * BLOCK + k] = values[k][lane];
            }
        });
    }

    Dims d_;
    Weights w_;
    Team team_;
    Multiplier multiplier_;
    SlotAttention attention_;
    Batch b_{};
    float* logits_ = nullptr;
    bool few_ = true;
    int64_t capacity_ = 0;
    Floats residual_, gated_, normed_;
};

}  // namespace
}  // namespace hp

extern "C" {

// Dims, Weights and Cache as above. The pointers are the caller's and must outlive the model. Returns null when memory or threads are wanting.
void* hp_model_create(const void* dims, const void* weights, const void* cache, int64_t threads) {
    try {
        return new hp::Model(*static_cast<const hp::Dims*>(dims), *static_cast<const hp::Weights*>(weights),
                             *static_cast<const hp::Cache*>(cache), static_cast<int>(threads));
    } catch (...) {
        return nullptr;
    }
}

// One Batch. 0 when done, 1 when memory is wanting.
int64_t hp_model_step(void* model, const void* batch, float* logits) {
    try {
        static_cast<hp::Model*>(model)->step(*static_cast<const hp::Batch*>(batch), logits);
        return 0;
    } catch (...) {
        return 1;
    }
}

void hp_model_destroy(void* model) { delete static_cast<hp::Model*>(model); }
}
