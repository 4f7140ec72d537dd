// Attention of any step over the KV slots, for all layers of a side: projected heads in, attended heads out.
//
// The projections stay with the engine, or with other parts; this takes their outputs, rotates, writes the cache and attends.
#include "slot_attention.h"

namespace hp {
namespace {

struct Shape {
    int64_t queries, keys, dim, positions;
};

class Attention {
  public:
    Attention(const Shape& shape, const Cache& cache, int threads)
        : h_{shape.queries, shape.keys, shape.dim}, team_(threads), alone_(1), attention_(team_, h_, shape.positions, cache, false),
          single_(alone_, h_, shape.positions, cache, false) {}

    // Queries [token][heads][dim], keys and values [token][KV heads][dim], cosines and sines [token][dim] (the second half repeats the
    // first), out as queries.
    void layer(int64_t layer, const Batch& batch, const float* queries, const float* keys, const float* values, const float* cosines,
               const float* sines, float* out) {
        int64_t reads = 0;
        for (int64_t t = 0; t < batch.num_tokens; t++) reads += (batch.positions[t] + 1) * h_.keys * h_.dim;
        if (reads < LEAST_READS) run(alone_, single_, layer, batch, queries, keys, values, cosines, sines, out);
        else run(team_, attention_, layer, batch, queries, keys, values, cosines, sines, out);
    }

  private:
    static constexpr int64_t LEAST_READS = 1 << 17;  // key elements; below, one thread is done before another is awake

    void run(Team& team, SlotAttention& attention, int64_t layer, const Batch& batch, const float* queries, const float* keys,
             const float* values, const float* cosines, const float* sines, float* out) {
        attention.begin(batch);
        team.run([&](int thread) {
            shape_tiles(batch.num_tokens);
            const int64_t begin = share(h_.all(), thread, team.size()), end = share(h_.all(), thread + 1, team.size());
            for (int64_t t = 0; t < batch.num_tokens; t++)
                for (int64_t head = begin; head < end; head++) {
                    std::memcpy(attention.row(t, head), source(t, head, queries, keys, values), static_cast<size_t>(h_.dim) * sizeof(float));
                    attention.place_head(layer, head, t, cosines + t * h_.dim, sines + t * h_.dim);
                }
            team.barrier();
            attention.attend(thread, layer, false, [&](int64_t token, int64_t head) { return Target{out + (token * h_.queries + head) * h_.dim, 1}; });
            shape_tiles(0);
        });
    }

    const float* source(int64_t token, int64_t head, const float* queries, const float* keys, const float* values) const {
        if (head < h_.queries) return queries + (token * h_.queries + head) * h_.dim;
        const int64_t kv_head = (head - h_.queries) % h_.keys;
        return (head < h_.queries + h_.keys ? keys : values) + (token * h_.keys + kv_head) * h_.dim;
    }

    const Heads h_;
    Team team_, alone_;
    SlotAttention attention_, single_;
};

}  // namespace
}  // namespace hp

extern "C" {

// Shape and Cache; the cache is the caller's. Null when memory or threads are wanting.
void* hp_attention_create(const void* shape, const void* cache, int64_t threads) {
    try {
        return new hp::Attention(*static_cast<const hp::Shape*>(shape), *static_cast<const hp::Cache*>(cache), static_cast<int>(threads));
    } catch (...) {
        return nullptr;
    }
}

// One layer of one Batch. 0 when done, 1 when memory is wanting.
int64_t hp_attention_layer(void* attention, int64_t layer, const void* batch, const float* queries, const float* keys, const float* values,
                           const float* cosines, const float* sines, float* out) {
    try {
        static_cast<hp::Attention*>(attention)->layer(layer, *static_cast<const hp::Batch*>(batch), queries, keys, values, cosines, sines, out);
        return 0;
    } catch (...) {
        return 1;
    }
}

void hp_attention_destroy(void* attention) { delete static_cast<hp::Attention*>(attention); }
}
