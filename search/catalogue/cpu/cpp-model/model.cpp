// The whole forward of a Llama-family decoder as one function: tokens in, logits of each sequence's last token out.
//
//   embed ─► per layer [ norm · q,k,v · rotary · KV write | attention | o · residual | norm · gate,up · SiLU | down · residual ] ─► norm · head
//            `|` is a barrier of the team; within a phase each thread has a fixed range of weight tiles, which it streams once
//
// Up to 8 tokens, weights are decoded in registers and used for all tokens at once; above, they are decoded once into cache
// panels. Results depend on the number of threads (attention is cut into shares), never on timing.
#include <memory>
#include <vector>

#include "amx.h"
#include "attention.h"
#include "digits.h"
#include "pool.h"

namespace hp {

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

using Floats = std::vector<float>;

// Activations as products read them: groups of `group` tokens, [group][column][token of group]; a group of one is a plain row.
struct Grouped {
    float* data;
    int64_t columns;
    int group;
    float* column(int64_t token, int64_t column) const { return data + (token / group * columns + column) * group + token % group; }
};

#if HP_AMX
template <class T>
using Aligned = std::vector<T, AlignedAllocator<T>>;

// Activations as the matrix unit reads them.
struct Terms {
    Aligned<uint16_t> values;
    Floats sums;
    void reserve(int64_t row_tiles, int64_t columns) {
        const auto size = static_cast<size_t>(row_tiles * (columns / BLOCK) * TERMS * UNIT);
        if (values.size() >= size) return;
        values.resize(size);
        sums.resize(static_cast<size_t>(row_tiles * (columns / BLOCK) * 16));
    }
};
#endif

class Model {
  public:
    Model(const Dims& dims, const Weights& weights, const Cache& cache, int threads)
        : d_(dims), w_(weights), cache_(cache), team_(threads), own_(static_cast<size_t>(threads)) {
        widest_ = std::max(std::max(d_.hidden, d_.intermediate), d_.heads * d_.head_dim);
        for (Own& own : own_) {
            own.x.resize(static_cast<size_t>(widest_ * FEW));
            own.sums.resize(static_cast<size_t>(widest_ / BLOCK * FEW));
            own.panels.resize(static_cast<size_t>(2 * TILE * widest_));
            own.digits.resize(static_cast<size_t>(widest_ * std::max(FEW, EXACT_DIGITS * EXACT_ROWS)));
            own.scales.resize(static_cast<size_t>(2 * widest_ / BLOCK * FEW));
            own.bias.resize(static_cast<size_t>(widest_ / BLOCK * std::max(FEW, EXACT_DIGITS * EXACT_ROWS)));
            own.attention.resize(static_cast<size_t>(
                std::max(3 * (d_.positions + TILE), lanes_scratch(static_cast<int>(d_.head_dim)))));
        }
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
    struct Own {  // one thread's scratch
        Floats x, sums, panels, attention, scales;
        std::vector<int8_t> digits;
        std::vector<int32_t> bias;
#if HP_AMX
        std::unique_ptr<Panel> panel{new Panel};
        Terms terms;
        Aligned<float> products;
#endif
    };

    const Matrix& matrix(int64_t layer, Role role) const { return w_.matrices[layer * ROLES + role]; }
    const Matrix& head() const { return w_.matrices[d_.layers * ROLES]; }
    const Matrix& embedding() const { return w_.matrices[d_.layers * ROLES + 1]; }
    int64_t from(int64_t units, int thread) const { return units * thread / team_.size(); }

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
#if HP_AMX
        const int64_t row_tiles = (tokens + 15) / 16;
        terms_.reserve(row_tiles, widest_);
        for (Own& own : own_) {
            own.terms.reserve(1, widest_);
            own.products.resize(static_cast<size_t>(ROW_TILES * 16 * SUM_STEP));
        }
#endif
    }

    // How many tokens `products` wants in a group: rows for the matrix unit, all for few, else as many as a kernel takes.
    int group_of(int64_t tokens) const {
        if (on_matrix_unit(tokens)) return 1;
        return tokens <= FEW ? static_cast<int>(tokens) : GROUP;
    }

    void forward(int thread) {
#if HP_AMX
        if (on_matrix_unit(b_.num_tokens)) configure_tiles(rows_for(b_.num_tokens));
#endif
        compute(thread);
#if HP_AMX
        if (on_matrix_unit(std::max(b_.num_tokens, b_.num_seqs))) release_tiles();
#endif
    }

    void compute(int thread) {
        embed(thread);
        team_.barrier();
        for (int64_t layer = 0; layer < d_.layers; layer++) {
            Grouped x = normalise(thread, w_.norms + 2 * layer * d_.hidden, b_.num_tokens, false);
            queries_keys_values(thread, layer, x);
            team_.barrier();
            x = few_ ? attend_few(thread, layer) : attend_many(thread, layer);
            add_product(thread, matrix(layer, O), x);
            team_.barrier();
            x = normalise(thread, w_.norms + (2 * layer + 1) * d_.hidden, b_.num_tokens, false);
            gate_up(thread, layer, x);
            team_.barrier();
            x = gated();
            block_sums(thread, x, b_.num_tokens);
            next_item_.store(0, std::memory_order_relaxed);
            add_product(thread, matrix(layer, DOWN), x);
            team_.barrier();
        }
#if HP_AMX
        if (on_matrix_unit(b_.num_seqs)) configure_tiles(rows_for(b_.num_seqs));
#endif
        logits(thread);
    }

    // ---- products -----------------------------------------------------------------------------------------------

    struct Place {
        const Matrix* matrix;
        int64_t tile;
    };

    // Tiles `unit` of [0, units) that are this thread's, two at a time; emit(unit, token, tokens, a, b, stride): a[i · stride + lane]
    // is the product of token + i with row lane of tile `unit`, b that of the next, null when there is none.
    template <class At, class Emit>
    void products(int thread, int64_t tokens, const Grouped& x, int64_t units, int64_t grain, At&& at, Emit&& emit) {
        const int64_t begin = from(units / grain, thread) * grain, end = from(units / grain, thread + 1) * grain;
#if HP_AMX
        if (on_matrix_unit(tokens)) return products_on_matrix_unit(thread, tokens, x, begin, end, at, emit);
#endif
        if (tokens <= FEW) products_of_few(thread, static_cast<int>(tokens), x, begin, end, at, emit);
        else products_of_many(thread, tokens, x, begin, end, at, emit);
    }

    template <class At, class Emit>
    void products_of_few(int thread, int tokens, const Grouped& x, int64_t begin, int64_t end, At&& at, Emit&& emit) {
        Own& own = own_[static_cast<size_t>(thread)];
        const int64_t blocks = x.columns / BLOCK;
        const Digits digits{own.digits.data(), own.scales.data(), d_.narrow ? own.scales.data() + blocks * tokens : own.sums.data(), own.bias.data()};
        int64_t prepared = -1;  // format whose order of columns the digits are in
        alignas(64) float out[2 * FEW * TILE];
        const auto one = [&](const Place& place, float* to) {
            const int64_t format = place.matrix->format;
            const uint8_t* tile = place.matrix->tile(place.tile);
            const DigitKernel kernel = digit_kernel(format, tokens, d_.narrow);
            if (!kernel.multiply) return few_rows_for(format, tokens)(tile, blocks, x.data, own.sums.data(), to);
            if (prepared != format) kernel.prepare(x.data, x.columns, tokens, digits);
            prepared = format;
            kernel.multiply(tile, blocks, digits, to);
        };
        for (int64_t unit = begin; unit < end; unit += 2) {
            const bool two = unit + 1 < end;
            one(at(unit), out);
            if (two) one(at(unit + 1), out + tokens * TILE);
            emit(unit, 0, tokens, out, two ? out + tokens * TILE : nullptr, TILE);
        }
    }

    template <class At, class Emit>
    void products_of_many(int thread, int64_t tokens, const Grouped& x, int64_t begin, int64_t end, At&& at, Emit&& emit) {
        Own& own = own_[static_cast<size_t>(thread)];
        const int64_t blocks = x.columns / BLOCK;
        float* panels[2] = {own.panels.data(), own.panels.data() + x.columns * TILE};
        const auto all = std::make_integer_sequence<int, GROUP>{};
        alignas(64) float out[2 * GROUP * TILE];
        for (int64_t unit = begin; unit < end; unit += 2) {
            const bool two = unit + 1 < end;
            for (int i = 0; i < (two ? 2 : 1); i++) {
                const Place place = at(unit + i);
                unpack(place.matrix->format, place.matrix->tile(place.tile), blocks, panels[i]);
            }
            for (int64_t token = 0; token < tokens; token += GROUP) {
                const int m = static_cast<int>(std::min<int64_t>(GROUP, tokens - token));
                const float* rows = x.data + token * x.columns;
                std::fill(out, out + 2 * m * TILE, 0.0f);
                if (PANELS == 2 && two) {
                    multiply_group<2>(m, panels, x.columns, rows, out, all);
                    emit(unit, token, m, out, out + TILE, 2 * TILE);
                } else {
                    multiply_group<1>(m, panels, x.columns, rows, out, all);
                    if (two) multiply_group<1>(m, panels + 1, x.columns, rows, out + m * TILE, all);
                    emit(unit, token, m, out, two ? out + m * TILE : nullptr, TILE);
                }
            }
        }
    }

#if HP_AMX
    bool on_matrix_unit(int64_t tokens) const { return tokens >= LEAST_ROWS && amx_allowed(); }

    template <class At, class Emit>
    void products_on_matrix_unit(int thread, int64_t tokens, const Grouped& x, int64_t begin, int64_t end, At&& at, Emit&& emit) {
        Own& own = own_[static_cast<size_t>(thread)];
        const int64_t row_tiles = (tokens + 15) / 16, blocks = x.columns / BLOCK;
        const bool shared = row_tiles > 1;  // a single tile of rows each thread splits for itself
        Terms& terms = shared ? terms_ : own.terms;
        split_rows(x.data, tokens, x.columns, shared ? from(row_tiles, thread) : 0, shared ? from(row_tiles, thread + 1) : 1,
                   d_.narrow, terms.values.data(), terms.sums.data());
        if (shared) team_.barrier();
        for (int64_t first = 0; first < row_tiles; first += ROW_TILES)
            for (int64_t unit = begin; unit < end; unit += TOGETHER)
                products_of_panel(own, tokens, blocks, terms, first, std::min<int64_t>(ROW_TILES, row_tiles - first), unit,
                                  static_cast<int>(std::min<int64_t>(TOGETHER, end - unit)), at, emit);
        if (shared) team_.barrier();  // the terms are written anew for the next product
    }

    // `count` tiles from `unit` on, with row tiles [first, first + row_tiles).
    template <class At, class Emit>
    void products_of_panel(Own& own, int64_t tokens, int64_t blocks, const Terms& terms, int64_t first, int64_t row_tiles, int64_t unit,
                           int count, At&& at, Emit&& emit) {
        const Matrix* matrices[TOGETHER];
        const uint8_t* tiles[TOGETHER];
        for (int i = 0; i < count; i++) {
            const Place place = at(unit + i);
            matrices[i] = place.matrix;
            tiles[i] = place.matrix->tile(place.tile);
        }
        const bool values = Panel::by_values(matrices, count);
        float* sums = own.products.data();
        std::fill(sums, sums + row_tiles * 16 * SUM_STEP, 0.0f);
        alignas(64) float taken[2 * TOGETHER * 256];
        for (int64_t b = 0; b < blocks; b += Panel::chunk(values)) {
            const int chunk = static_cast<int>(std::min<int64_t>(Panel::chunk(values), blocks - b));
            own.panel->fill(matrices, tiles, count, b, chunk, values);
            const bool narrow = d_.narrow && own.panel->scaled;
            for (int64_t tile = 0; tile < row_tiles; tile++) {
                const int64_t block = (first + tile) * blocks + b;
                const uint16_t* x = terms.values.data() + block * TERMS * UNIT;
                const float* block_sums = terms.sums.data() + block * 16;
                float* to = sums + tile * 16 * SUM_STEP;
                if (rows_for(tokens) == 8) multiply_tiles<8>(*own.panel, chunk, x, block_sums, narrow, taken, to);
                else multiply_tiles<16>(*own.panel, chunk, x, block_sums, narrow, taken, to);
            }
        }
        const int64_t token = first * 16;
        for (int i = 0; i < count; i += 2)
            emit(unit + i, token, static_cast<int>(std::min(row_tiles * 16, tokens - token)), sums + i * TILE,
                 i + 1 < count ? sums + (i + 1) * TILE : nullptr, static_cast<int>(SUM_STEP));
    }
#else
    static bool on_matrix_unit(int64_t) { return false; }
#endif

    // residual += matrix · x
    void add_product(int thread, const Matrix& m, const Grouped& x) {
        const auto add = [this](int64_t unit, int64_t token, const float* row) {
            float* to = residual_.data() + token * d_.hidden + unit * TILE;
            for (int lane = 0; lane < TILE; lane += LANES) vstore(to + lane, vload(to + lane) + vload(row + lane));
        };
        products(thread, b_.num_tokens, x, m.tiles(), 1, [&](int64_t unit) { return Place{&m, unit}; },
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
    Grouped normalise(int thread, const float* weight, int64_t count, bool last_only) {
        Own& own = own_[static_cast<size_t>(thread)];
        const bool few = count <= FEW;
        const Grouped x{few ? own.x.data() : normed_.data(), d_.hidden, group_of(count)};
        const int64_t begin = few ? 0 : from(count, thread), end = few ? count : from(count, thread + 1);
        for (int64_t i = begin; i < end; i++) {
            const float* row = residual_.data() + (last_only ? b_.seq_starts[i + 1] - 1 : i) * d_.hidden;
            V squares = vzero();
            for (int64_t c = 0; c < d_.hidden; c += LANES) squares = vfma(vload(row + c), vload(row + c), squares);
            const float scale = 1.0f / std::sqrt(vsum(squares) / static_cast<float>(d_.hidden) + static_cast<float>(d_.eps));
            float* to = x.column(i, 0);
            for (int64_t c = 0; c < d_.hidden; c++) to[c * x.group] = row[c] * scale * weight[c];
        }
        block_sums(thread, x, count);
        if (!few) team_.barrier();
        return x;
    }

    void block_sums(int thread, const Grouped& x, int64_t tokens) {
        if (tokens > FEW || on_matrix_unit(tokens)) return;
        float* sums = own_[static_cast<size_t>(thread)].sums.data();
        for (int64_t b = 0; b < x.columns / BLOCK; b++) {
            const float* block = x.data + b * BLOCK * tokens;
            if (tokens == 1) {
                V sum = vload(block);
                for (int k = LANES; k < BLOCK; k += LANES) sum = sum + vload(block + k);
                sums[b] = vsum(sum);
                continue;
            }
            float sum[FEW] = {};
            for (int k = 0; k < BLOCK; k++)
                for (int64_t m = 0; m < tokens; m++) sum[m] += block[k * tokens + m];
            std::copy(sum, sum + tokens, sums + b * tokens);
        }
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
        products(thread, b_.num_tokens, x, q + 2 * k, per_head, at,
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
        Own& own = own_[static_cast<size_t>(thread)];
        const int64_t begin = from(total, thread), end = from(total, thread + 1);
        stretches([&](int64_t t, int64_t h, int64_t start, int64_t count) {
            const int64_t first = std::max<int64_t>(begin - start, 0), last = std::min<int64_t>(end - start, count);
            if (first >= last) return;
            Partial partials[64];
            for (int64_t g = 0; g < group; g++) partials[g] = partial(t, h * group + g, thread);
            const int64_t base = cache_.at(b_.slots[token_seq_[static_cast<size_t>(t)]], h, first);
            const auto attend = [&](auto* keys, auto* values) {
                attend_stretch(query(t, h * group), static_cast<int>(group), static_cast<int>(d_.head_dim), keys + base, values + base,
                               cache_.position_stride, last - first, own.attention.data(), partials);
            };
            if (cache_.is_bf16)
                attend(static_cast<const uint16_t*>(cache_.keys[layer]), static_cast<const uint16_t*>(cache_.values[layer]));
            else
                attend(static_cast<const float*>(cache_.keys[layer]), static_cast<const float*>(cache_.values[layer]));
        });
        team_.barrier();
        return merge_shares(thread, total);
    }

    // Every thread merges for itself: the sums are small, and a barrier is saved.
    Grouped merge_shares(int thread, int64_t total) {
        Own& own = own_[static_cast<size_t>(thread)];
        const Grouped x{own.x.data(), d_.heads * d_.head_dim, group_of(b_.num_tokens)};
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
        block_sums(thread, x, b_.num_tokens);
        return x;
    }

    // Items (sequence, KV head, 16 query lanes) are taken from a counter: who computes one does not change its result.
    Grouped attend_many(int thread, int64_t layer) {
        const int64_t group = d_.heads / d_.kv_heads, width = d_.heads * d_.head_dim;
        Own& own = own_[static_cast<size_t>(thread)];
        const Grouped x{normed_.data(), width, group_of(b_.num_tokens)};
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
                                     own.attention.data(), [&](int i) { return query(token(i), head(i)); },
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

    Grouped gated() { return {gated_.data(), d_.intermediate, group_of(b_.num_tokens)}; }

    void gate_up(int thread, int64_t layer, const Grouped& x) {
        const Grouped to = gated();
        products(thread, b_.num_tokens, x, 2 * matrix(layer, GATE).tiles(), 2,
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
        const Grouped x = normalise(thread, w_.norms + 2 * d_.layers * d_.hidden, b_.num_seqs, true);
        products(thread, b_.num_seqs, x, head().tiles(), 1, [&](int64_t unit) { return Place{&head(), unit}; },
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
    std::vector<Own> own_;
    Batch b_{};
    float* logits_ = nullptr;
    bool few_ = true;
    int64_t capacity_ = 0, widest_ = 0;
    Floats residual_, projected_, attended_, gated_, normed_, partials_;
    std::vector<int64_t> token_seq_;
    std::atomic<int64_t> next_item_{0};
#if HP_AMX
    Terms terms_;
#endif
};

}  // namespace hp

extern "C" {

// The pointers are the caller's and must outlive the model. Returns null when memory or threads are wanting.
void* hp_model_create(const hp::Dims* dims, const hp::Weights* weights, const hp::Cache* cache, int64_t threads) {
    try {
        return new hp::Model(*dims, *weights, *cache, static_cast<int>(threads));
    } catch (...) {
        return nullptr;
    }
}

// 0 when done, 1 when memory is wanting.
int64_t hp_model_step(void* model, const hp::Batch* batch, float* logits) {
    try {
        static_cast<hp::Model*>(model)->step(*batch, logits);
        return 0;
    } catch (...) {
        return 1;
    }
}

void hp_model_destroy(void* model) { delete static_cast<hp::Model*>(model); }
}
