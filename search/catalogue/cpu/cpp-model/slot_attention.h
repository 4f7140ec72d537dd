// Attention of a whole step over the KV slots, shared among a team: rotary, cache writes, and either form of attention.h.
//
// It takes projected rows [token][query heads, then KV heads of keys, then of values][head_dim] and gives [head_dim] for each
// (token, query head). Which form runs depends on the number of tokens alone.
#pragma once

#include <vector>

#include "amx_attention.h"
#include "pool.h"

namespace hp {
namespace {

struct Batch {
    const int64_t *tokens, *positions, *seq_starts, *slots;
    int64_t num_seqs, num_tokens;
};

struct Heads {
    int64_t queries, keys, dim;  // number of query heads, of KV heads; head_dim
    int64_t all() const { return queries + 2 * keys; }
    int64_t group() const { return queries / keys; }
};

class SlotAttention {
  public:
    // `narrow`: prompts may be rounded to bfloat16 on the matrix unit.
    SlotAttention(Team& team, const Heads& heads, int64_t positions, const Cache& cache, bool narrow)
        : team_(team), h_(heads), cache_(cache), narrow_(narrow) {
        const int64_t scratch = std::max(3 * (positions + TILE), lanes_scratch(static_cast<int>(h_.dim)));
        scratch_.assign(static_cast<size_t>(team.size()), Floats(static_cast<size_t>(scratch)));
        partials_.resize(static_cast<size_t>(FEW * h_.queries * team.size() * (h_.dim + 2)));
#if HP_AMX
        items_.resize(static_cast<size_t>(team.size()));
        for (ItemScratch& own : items_) own.reserve(h_.dim);
#endif
    }

    // Before a step, by one thread.
    void begin(const Batch& batch) {
        b_ = batch;
        rows_.resize(static_cast<size_t>(std::max<int64_t>(b_.num_tokens * h_.all() * h_.dim, static_cast<int64_t>(rows_.size()))));
        sequence_.resize(static_cast<size_t>(b_.num_tokens));
        for (int64_t s = 0; s < b_.num_seqs; s++)
            for (int64_t t = b_.seq_starts[s]; t < b_.seq_starts[s + 1]; t++) sequence_[static_cast<size_t>(t)] = s;
        total_ = 0;
        for (int64_t t = 0; t < b_.num_tokens; t++) total_ += h_.keys * (b_.positions[t] + 1);
        place_units();
        begin_layer();
    }
    // Before each further layer, while no thread attends.
    void begin_layer() { next_item_.store(0, std::memory_order_relaxed); }

    float* row(int64_t token, int64_t head) { return rows_.data() + (token * h_.all() + head) * h_.dim; }

    // Rotates a query in place, scaled for attention; writes a rotated key, or a value, into the cache. Tables: [head_dim / 2].
    void place_head(int64_t layer, int64_t head, int64_t token, const float* cosine, const float* sine) {
        float* values = row(token, head);
        const bool is_query = head < h_.queries, is_value = head >= h_.queries + h_.keys;
        if (!is_value) {
            const float scale = is_query ? 1.0f / std::sqrt(static_cast<float>(h_.dim)) : 1.0f;
            const int64_t half = h_.dim / 2;
            for (int64_t i = 0; i < half; i++) {
                const float first = values[i] * cosine[i] - values[half + i] * sine[i];
                const float second = values[half + i] * cosine[i] + values[i] * sine[i];
                values[i] = first * scale;
                values[half + i] = second * scale;
            }
        }
        if (is_query) return;
        const int64_t to = cache_.at(slot(token), (head - h_.queries) % h_.keys, b_.positions[token]);
        cache_.store((is_value ? cache_.values : cache_.keys)[layer], to, values, h_.dim);
    }

    // By every thread, after all heads are placed; target(token, head) is a Target. With `for_each`, every thread gets every result
    // (into a target of its own: a barrier is saved); else each result is written by one thread. `for_each` is for few tokens only.
    template <class To>
    void attend(int thread, int64_t layer, bool for_each, To&& target) {
        if (b_.num_tokens > FEW) return attend_many(thread, layer, target);
        attend_few(thread, layer);
        team_.barrier();
        const int64_t pairs = b_.num_tokens * h_.keys;
        int64_t pair = 0;
        stretches([&](int64_t token, int64_t kv_head, int64_t start, int64_t count) {
            if (for_each || (pair >= from(pairs, thread) && pair < from(pairs, thread + 1)))
                for (int64_t head = kv_head * h_.group(); head < (kv_head + 1) * h_.group(); head++)
                    merge_shares(token, head, start, count, target(token, head));
            pair++;
        });
    }

  private:
    int64_t from(int64_t units, int thread) const { return share(units, thread, team_.size()); }
    int64_t slot(int64_t token) const { return b_.slots[sequence_[static_cast<size_t>(token)]]; }

    Partial partial(int64_t token, int64_t head, int thread) {
        float* base = partials_.data() + ((token * h_.queries + head) * team_.size() + thread) * (h_.dim + 2);
        return Partial{base, base + 1, base + 2};
    }

    // All visible positions of all (token, KV head) in one line: f(token, KV head, start in the line, count).
    template <class F>
    void stretches(F&& f) const {
        int64_t start = 0;
        for (int64_t t = 0; t < b_.num_tokens; t++)
            for (int64_t h = 0; h < h_.keys; h++) {
                f(t, h, start, b_.positions[t] + 1);
                start += b_.positions[t] + 1;
            }
    }

    // Calls f with the layer's keys and values as pointers of their type.
    template <class F>
    void with_cache(int64_t layer, F&& f) const {
        if (cache_.is_bf16) f(static_cast<const uint16_t*>(cache_.keys[layer]), static_cast<const uint16_t*>(cache_.values[layer]));
        else f(static_cast<const float*>(cache_.keys[layer]), static_cast<const float*>(cache_.values[layer]));
    }

    void attend_few(int thread, int64_t layer) {
        const int64_t begin = from(total_, thread), end = from(total_, thread + 1);
        stretches([&](int64_t t, int64_t h, int64_t start, int64_t count) {
            const int64_t first = std::max<int64_t>(begin - start, 0), last = std::min<int64_t>(end - start, count);
            if (first >= last) return;
            Partial partials[MOST_GROUPED];
            for (int64_t g = 0; g < h_.group(); g++) partials[g] = partial(t, h * h_.group() + g, thread);
            const int64_t base = cache_.at(slot(t), h, first);
            with_cache(layer, [&](auto* keys, auto* values) {
                attend_stretch(row(t, h * h_.group()), static_cast<int>(h_.group()), static_cast<int>(h_.dim), keys + base, values + base,
                               cache_.position_stride, last - first, scratch_[static_cast<size_t>(thread)].data(), partials);
            });
        });
    }

    // The threads whose share meets [start, start + count) of the line have each left a partial result.
    void merge_shares(int64_t token, int64_t head, int64_t start, int64_t count, const Target& to) {
        int first = 0;
        while (from(total_, first + 1) <= start) first++;
        int last = first;
        while (from(total_, last + 1) < start + count) last++;
        float maximum = -1e30f, sum = 0;
        for (int i = first; i <= last; i++)
            if (has_share(i)) maximum = std::max(maximum, *partial(token, head, i).maximum);
        for (int64_t c = 0; c < h_.dim; c++) to.data[c * to.step] = 0;
        for (int i = first; i <= last; i++) {
            if (!has_share(i)) continue;
            const Partial part = partial(token, head, i);
            const float weight = std::exp(*part.maximum - maximum);
            sum += weight * *part.sum;
            for (int64_t c = 0; c < h_.dim; c++) to.data[c * to.step] += weight * part.values[c];
        }
        const float inverse = 1 / sum;
        for (int64_t c = 0; c < h_.dim; c++) to.data[c * to.step] *= inverse;
    }
    bool has_share(int thread) const { return from(total_, thread) < from(total_, thread + 1); }

    // Items (sequence, KV head, some pairs) are taken from a counter: who computes one does not change its result.
    template <class To>
    void attend_many(int thread, int64_t layer, To&& target) {
        split_cache(thread, layer);
        int64_t mine = next_item_.fetch_add(1, std::memory_order_relaxed), item = 0;
        for (int64_t s = 0; s < b_.num_seqs; s++) {
            const int64_t pairs = (b_.seq_starts[s + 1] - b_.seq_starts[s]) * h_.group(), size = on_unit(s) ? UNIT_PAIRS : TILE;
            for (int64_t h = 0; h < h_.keys; h++)
                for (int64_t block = (pairs - 1) / size; block >= 0; block--, item++) {  // the longest first
                    if (item != mine) continue;
                    mine = next_item_.fetch_add(1, std::memory_order_relaxed);
                    attend_item(thread, layer, s, h, block * size, static_cast<int>(std::min(size, pairs - block * size)), target);
                }
        }
    }

    template <class To>
    void attend_item(int thread, int64_t layer, int64_t seq, int64_t kv_head, int64_t pair, int lanes, To&& target) {
        int64_t last[UNIT_PAIRS];
        const float* queries[UNIT_PAIRS];
        Target targets[UNIT_PAIRS];
        int64_t token = b_.seq_starts[seq] + pair / h_.group(), member = pair % h_.group();
        for (int i = 0; i < lanes; i++) {
            const int64_t head = kv_head * h_.group() + member;
            last[i] = b_.positions[token];
            queries[i] = row(token, head);
            targets[i] = target(token, head);
            if (++member == h_.group()) member = 0, token++;
        }
        const int dim = static_cast<int>(h_.dim);
#if HP_AMX
        if (on_unit(seq))
            return (narrow_ ? attend_pairs<1> : attend_pairs<TERMS>)(lanes, last, dim, split(seq, kv_head), items_[static_cast<size_t>(thread)],
                                                                     queries, targets);
#endif
        const int64_t base = cache_.at(b_.slots[seq], kv_head, 0);
        with_cache(layer, [&](auto* keys, auto* values) {
            attend_lanes(lanes, last, dim, keys + base, values + base, cache_.position_stride, scratch_[static_cast<size_t>(thread)].data(),
                         queries, targets);
        });
    }

    // ---- the matrix unit: keys and values of prompts as units, once a layer --------------------------------------------

#if HP_AMX
    static constexpr int64_t UNIT_PAIRS = PAIRS;

    int kept() const { return narrow_ ? 1 : TERMS; }
    bool on_unit(int64_t seq) const { return unit_starts_[static_cast<size_t>(seq)] >= 0; }
    int64_t padded(int64_t seq) const {
        return (b_.positions[b_.seq_starts[seq + 1] - 1] + STEP_POSITIONS) / STEP_POSITIONS * STEP_POSITIONS;
    }

    void place_units() {
        unit_starts_.assign(static_cast<size_t>(b_.num_seqs), -1);
        if (b_.num_tokens <= FEW || h_.dim % BLOCK || h_.dim / BLOCK > MOST_DIM_BLOCKS || !amx_allowed()) return;
        int64_t start = 0;
        for (int64_t s = 0; s < b_.num_seqs; s++) {
            if ((b_.seq_starts[s + 1] - b_.seq_starts[s]) * h_.group() < LEAST_PAIRS) continue;
            unit_starts_[static_cast<size_t>(s)] = start;
            start += 2 * h_.keys * SplitCache::units(padded(s), h_.dim, kept());
        }
        if (units_.size() < static_cast<size_t>(start * UNIT)) units_.resize(static_cast<size_t>(start * UNIT));
    }

    SplitCache split(int64_t seq, int64_t kv_head) {
        const int64_t size = SplitCache::units(padded(seq), h_.dim, kept());
        uint16_t* keys = units_.data() + (unit_starts_[static_cast<size_t>(seq)] + 2 * kv_head * size) * UNIT;
        return SplitCache{keys, keys + size * UNIT, padded(seq)};
    }

    void split_cache(int thread, int64_t layer) {
        if (std::all_of(unit_starts_.begin(), unit_starts_.end(), [](int64_t start) { return start < 0; })) return;
        for (int64_t s = 0; s < b_.num_seqs; s++) {
            if (!on_unit(s)) continue;
            const int64_t count = b_.positions[b_.seq_starts[s + 1] - 1] + 1, groups = padded(s) / BLOCK, all = groups * h_.keys;
            for (int64_t unit = from(all, thread); unit < from(all, thread + 1); unit++) {
                const int64_t kv_head = unit / groups, first = unit % groups * BLOCK, base = cache_.at(b_.slots[s], kv_head, 0);
                const SplitCache to = split(s, kv_head);
                with_cache(layer, [&](auto* keys, auto* values) {
                    using E = std::remove_const_t<std::remove_pointer_t<decltype(keys)>>;
                    (narrow_ ? split_positions<1, E> : split_positions<TERMS, E>)(keys + base, values + base, cache_.position_stride, first,
                                                                                  count - first, h_.dim, to.padded, to.keys, to.values);
                });
            }
        }
        team_.barrier();
    }

    Aligned<uint16_t> units_;
    std::vector<int64_t> unit_starts_;  // of each sequence, -1 when it goes without
    std::vector<ItemScratch> items_;    // one a thread
#else
    static constexpr int64_t UNIT_PAIRS = TILE;
    static bool on_unit(int64_t) { return false; }
    static void place_units() {}
    static void split_cache(int, int64_t) {}
#endif

    Team& team_;
    const Heads h_;
    const Cache cache_;
    const bool narrow_;
    Batch b_{};
    int64_t total_ = 0;
    Floats rows_, partials_;
    std::vector<Floats> scratch_;  // one a thread
    std::vector<int64_t> sequence_;            // of each token
    std::atomic<int64_t> next_item_{0};
};

}  // namespace
}  // namespace hp
