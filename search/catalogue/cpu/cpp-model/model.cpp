// The whole forward of a Llama-family decoder as one function: tokens in, logits of each sequence's last token out.
//
//   embed ─► per layer [ norm · q,k,v · rotary · KV write | attention | o · residual | norm · gate,up · SiLU | down · residual ] ─► norm · head
//            `|` is a barrier of the team; within a phase each thread has a fixed range of weight tiles, which it streams once
//
// Up to 8 tokens, weights are decoded in registers and used for all tokens at once; above, they are decoded once into cache
// panels. Results depend on the number of threads (attention is cut into shares), never on timing.
#include <vector>

#include "attention.h"
#include "products.h"

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

struct Batch {
    const int64_t *tokens, *positions, *seq_starts, *slots;
    int64_t num_seqs, num_tokens;
};

enum Role { Q, K, VALUE, O, GATE, UP, DOWN, ROLES };

class Model {
  public:
    Model(const Dims& dims, const Weights& weights, const Cache& cache, int threads)
        : d_(dims), w_(weights), cache_(cache), team_(threads),
          multiplier_(team_, std::max(std::max(d_.hidden, d_.intermediate), d_.heads * d_.head_dim), d_.narrow) {
        const int64_t scratch = std::max(3 * (d_.positions + TILE), lanes_scratch(static_cast<int>(d_.head_dim)));
        attention_.assign(static_cast<size_t>(threads), Floats(static_cast<size_t>(scratch)));
    }

    void step(const Batch& batch, float* logits) {
        b_ = batch;
        logits_ = logits;
        few_ = b_.num_tokens <= FEW;
        reserve(b_.num_tokens);
        next_item_.store(0, std::memory_order_relaxed);
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
        const int64_t width = d_.heads * d_.head_dim;
        residual_.resize(size(d_.hidden));
        projected_.resize(size(width + 2 * d_.kv_heads * d_.head_dim));
        attended_.resize(size(width));
        gated_.resize(size(d_.intermediate));
        normed_.resize(size(std::max(d_.hidden, width)));
        token_seq_.resize(static_cast<size_t>(capacity_));
        partials_.resize(static_cast<size_t>(FEW * d_.heads * team_.size() * (d_.head_dim + 2)));
        multiplier_.reserve(tokens);
    }

    void forward(int thread) {
        Multiplier::shape_tiles(b_.num_tokens);
        compute(thread);
        Multiplier::shape_tiles(0);
    }

    void compute(int thread) {
        embed(thread);
        team_.barrier();
        for (int64_t layer = 0; layer < d_.layers; layer++) {
            Grouped x = normalise(thread, w_.norms + 2 * layer * d_.hidden, b_.num_tokens, matrix(layer, Q), false);
            queries_keys_values(thread, layer, x);
            team_.barrier();
            x = few_ ? attend_few(thread, layer) : attend_many(thread, layer);
            add_product(thread, matrix(layer, O), x);
            team_.barrier();
            x = normalise(thread, w_.norms + (2 * layer + 1) * d_.hidden, b_.num_tokens, matrix(layer, GATE), false);
            gate_up(thread, layer, x);
            team_.barrier();
            x = gated(layer);
            multiplier_.block_sums(thread, x, b_.num_tokens);
            next_item_.store(0, std::memory_order_relaxed);
            add_product(thread, matrix(layer, DOWN), x);
            team_.barrier();
        }
        Multiplier::shape_tiles(b_.num_seqs);
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
        if (thread == 0)
            for (int64_t s = 0; s < b_.num_seqs; s++)
                for (int64_t t = b_.seq_starts[s]; t < b_.seq_starts[s + 1]; t++) token_seq_[static_cast<size_t>(t)] = s;
    }

    // RMS norm of each token (of each sequence's last, for the head), as products read it.
    Grouped normalise(int thread, const float* weight, int64_t count, const Matrix& reader, bool last_only) {
        const bool few = count <= FEW;
        const Grouped x{few ? multiplier_.few(thread) : normed_.data(), d_.hidden, Multiplier::group_of(count, reader)};
        const int64_t begin = few ? 0 : from(count, thread), end = few ? count : from(count, thread + 1);
        for (int64_t i = begin; i < end; i++) {
            const float* row = residual_.data() + (last_only ? b_.seq_starts[i + 1] - 1 : i) * d_.hidden;
            V squares = vzero();
            for (int64_t c = 0; c < d_.hidden; c += LANES) squares = vfma(vload(row + c), vload(row + c), squares);
            const float scale = 1.0f / std::sqrt(vsum(squares) / static_cast<float>(d_.hidden) + static_cast<float>(d_.eps));
            float* to = x.column(i, 0);
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
            std::memcpy(projected_.data() + (token * (q + 2 * k) + unit) * TILE, row, sizeof(float) * TILE);
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
            for (int64_t t = 0; t < b_.num_tokens; t++) place_head(layer, head, t);
    }

    // Rotates a query in place, scaled for attention; writes a rotated key or a value into the cache.
    void place_head(int64_t layer, int64_t head, int64_t token) {
        const int64_t heads = d_.heads + 2 * d_.kv_heads, half = d_.head_dim / 2, position = b_.positions[token];
        float* row = projected_.data() + (token * heads + head) * d_.head_dim;
        const int64_t kv_head = (head - d_.heads) % d_.kv_heads;
        const bool is_query = head < d_.heads, is_value = head >= d_.heads + d_.kv_heads;
        if (!is_value) {
            const float* cosine = w_.cosines + position * half;
            const float* sine = w_.sines + position * half;
            const float scale = is_query ? 1.0f / std::sqrt(static_cast<float>(d_.head_dim)) : 1.0f;
            for (int64_t i = 0; i < half; i++) {
                const float first = row[i] * cosine[i] - row[half + i] * sine[i];
                const float second = row[half + i] * cosine[i] + row[i] * sine[i];
                row[i] = first * scale;
                row[half + i] = second * scale;
            }
        }
        if (is_query) return;
        const int64_t to = cache_.at(b_.slots[token_seq_[static_cast<size_t>(token)]], kv_head, position);
        cache_.store((is_value ? cache_.values : cache_.keys)[layer], to, row, d_.head_dim);
    }

    const float* query(int64_t token, int64_t head) const {
        return projected_.data() + (token * (d_.heads + 2 * d_.kv_heads) + head) * d_.head_dim;
    }

    Partial partial(int64_t token, int64_t head, int thread) {
        float* base = partials_.data() + ((token * d_.heads + head) * team_.size() + thread) * (d_.head_dim + 2);
        return Partial{base, base + 1, base + 2};
    }

    // All cached positions of all (token, KV head) in one line: thread i computes [total · i / n, total · (i + 1) / n).
    template <class F>
    void stretches(F&& f) const {
        int64_t start = 0;
        for (int64_t t = 0; t < b_.num_tokens; t++)
            for (int64_t h = 0; h < d_.kv_heads; h++) {
                f(t, h, start, b_.positions[t] + 1);
                start += b_.positions[t] + 1;
            }
    }
    int64_t all_positions() const {
        int64_t total = 0;
        for (int64_t t = 0; t < b_.num_tokens; t++) total += d_.kv_heads * (b_.positions[t] + 1);
        return total;
    }

    Grouped attend_few(int thread, int64_t layer) {
        const int64_t total = all_positions(), group = d_.heads / d_.kv_heads;
        const int64_t begin = from(total, thread), end = from(total, thread + 1);
        stretches([&](int64_t t, int64_t h, int64_t start, int64_t count) {
            const int64_t first = std::max<int64_t>(begin - start, 0), last = std::min<int64_t>(end - start, count);
            if (first >= last) return;
            Partial partials[64];
            for (int64_t g = 0; g < group; g++) partials[g] = partial(t, h * group + g, thread);
            const int64_t base = cache_.at(b_.slots[token_seq_[static_cast<size_t>(t)]], h, first);
            const auto attend = [&](auto* keys, auto* values) {
                attend_stretch(query(t, h * group), static_cast<int>(group), static_cast<int>(d_.head_dim), keys + base, values + base,
                               cache_.position_stride, last - first, attention_[static_cast<size_t>(thread)].data(), partials);
            };
            if (cache_.is_bf16)
                attend(static_cast<const uint16_t*>(cache_.keys[layer]), static_cast<const uint16_t*>(cache_.values[layer]));
            else
                attend(static_cast<const float*>(cache_.keys[layer]), static_cast<const float*>(cache_.values[layer]));
        });
        team_.barrier();
        return merge_shares(thread, layer, total);
    }

    // Every thread merges for itself: the sums are small, and a barrier is saved.
    Grouped merge_shares(int thread, int64_t layer, int64_t total) {
        const Grouped x{multiplier_.few(thread), d_.heads * d_.head_dim, Multiplier::group_of(b_.num_tokens, matrix(layer, O))};
        const int64_t group = d_.heads / d_.kv_heads;
        stretches([&](int64_t t, int64_t h, int64_t start, int64_t count) {
            int first = 0;
            while (from(total, first + 1) <= start) first++;
            int last = first;
            while (from(total, last + 1) < start + count) last++;
            for (int64_t head = h * group; head < (h + 1) * group; head++) {
                float maximum = -1e30f, sum = 0, weights[64];
                for (int i = first; i <= last; i++) maximum = std::max(maximum, *partial(t, head, i).maximum);
                for (int i = first; i <= last; i++) {
                    const bool empty = from(total, i) == from(total, i + 1);
                    weights[i - first] = empty ? 0 : std::exp(*partial(t, head, i).maximum - maximum);
                    if (!empty) sum += weights[i - first] * *partial(t, head, i).sum;
                }
                float* to = x.column(t, head * d_.head_dim);
                for (int64_t c = 0; c < d_.head_dim; c++) {
                    float value = 0;
                    for (int i = first; i <= last; i++) value += weights[i - first] * partial(t, head, i).values[c];
                    to[c * x.group] = value / sum;
                }
            }
        });
        multiplier_.block_sums(thread, x, b_.num_tokens);
        return x;
    }

    // Items (sequence, KV head, 16 query lanes) are taken from a counter: who computes one does not change its result.
    Grouped attend_many(int thread, int64_t layer) {
        const int64_t group = d_.heads / d_.kv_heads, width = d_.heads * d_.head_dim;
        const Grouped x{normed_.data(), width, Multiplier::group_of(b_.num_tokens, matrix(layer, O))};
        int64_t mine = next_item_.fetch_add(1, std::memory_order_relaxed), item = 0;
        for (int64_t s = 0; s < b_.num_seqs; s++) {
            const int64_t start = b_.seq_starts[s], pairs = (b_.seq_starts[s + 1] - start) * group;
            const int64_t lane_blocks = (pairs + TILE - 1) / TILE;
            for (int64_t h = 0; h < d_.kv_heads; h++)
                for (int64_t block = lane_blocks - 1; block >= 0; block--, item++) {  // the longest first
                    if (item != mine) continue;
                    mine = next_item_.fetch_add(1, std::memory_order_relaxed);
                    const int lanes = static_cast<int>(std::min<int64_t>(TILE, pairs - block * TILE));
                    int64_t last[TILE];
                    for (int i = 0; i < lanes; i++) last[i] = b_.positions[start + (block * TILE + i) / group];
                    const auto token = [&](int i) { return start + (block * TILE + i) / group; };
                    const auto head = [&](int i) { return h * group + (block * TILE + i) % group; };
                    const int64_t base = cache_.at(b_.slots[s], h, 0);
                    const auto attend = [&](auto* keys, auto* values) {
                        attend_lanes(lanes, last, static_cast<int>(d_.head_dim), keys + base, values + base, cache_.position_stride,
                                     attention_[static_cast<size_t>(thread)].data(), [&](int i) { return query(token(i), head(i)); },
                                     [&](int i) { return attended_.data() + token(i) * width + head(i) * d_.head_dim; });
                    };
                    if (cache_.is_bf16)
                        attend(static_cast<const uint16_t*>(cache_.keys[layer]), static_cast<const uint16_t*>(cache_.values[layer]));
                    else
                        attend(static_cast<const float*>(cache_.keys[layer]), static_cast<const float*>(cache_.values[layer]));
                }
        }
        team_.barrier();
        for (int64_t t = from(b_.num_tokens, thread); t < from(b_.num_tokens, thread + 1); t++) {
            float* to = x.column(t, 0);
            for (int64_t c = 0; c < width; c++) to[c * x.group] = attended_[static_cast<size_t>(t * width + c)];
        }
        team_.barrier();
        return x;
    }

    Grouped gated(int64_t layer) { return {gated_.data(), d_.intermediate, Multiplier::group_of(b_.num_tokens, matrix(layer, DOWN))}; }

    void gate_up(int thread, int64_t layer, const Grouped& x) {
        const Grouped to = gated(layer);
        multiplier_.run(thread, b_.num_tokens, x, 2 * matrix(layer, GATE).tiles(), 2,
                 [&](int64_t unit) { return Place{&matrix(layer, unit % 2 ? UP : GATE), unit / 2}; },
                 [&](int64_t unit, int64_t token, int tokens, const float* gate, const float* up, int stride) {
                     for (int i = 0; i < tokens; i++) {
                         alignas(64) float h[TILE];
                         for (int lane = 0; lane < TILE; lane += LANES)
                             vstore(h + lane, silu(vload(gate + i * stride + lane)) * vload(up + i * stride + lane));
                         float* column = to.column(token + i, unit / 2 * TILE);
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
    Cache cache_;
    Team team_;
    Multiplier multiplier_;
    std::vector<Floats> attention_;  // one thread's scratch
    Batch b_{};
    float* logits_ = nullptr;
    bool few_ = true;
    int64_t capacity_ = 0;
    Floats residual_, projected_, attended_, gated_, normed_, partials_;
    std::vector<int64_t> token_seq_;
    std::atomic<int64_t> next_item_{0};
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
