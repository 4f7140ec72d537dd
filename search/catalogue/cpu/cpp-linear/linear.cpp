// One projection on packed tiles: y = W x for any number of rows, in the accuracy of float32 or with 8-bit activations.
//
// All projections of a process share one team of threads: hundreds of slots would otherwise have threads each. A small product
// is done by the caller alone, since waking a thread takes longer.
#include <mutex>

#include "products.h"

namespace hp {
namespace {

// The threads of all projections, made with the first and ended with the last.
class SharedTeam {
  public:
    static std::shared_ptr<SharedTeam> get(int threads, int64_t widest, bool narrow) {
        static std::mutex lock;
        static std::vector<std::weak_ptr<SharedTeam>> made;
        const std::lock_guard<std::mutex> hold(lock);
        for (const auto& weak : made)
            if (auto found = weak.lock(); found && found->team.size() == threads && found->narrow == narrow && found->widest >= widest) return found;
        auto fresh = std::make_shared<SharedTeam>(threads, widest, narrow);
        made.push_back(fresh);
        return fresh;
    }
    SharedTeam(int threads, int64_t columns, bool narrow_) : widest(columns), narrow(narrow_), team(threads), multiplier(team, columns, narrow_) {}

    const int64_t widest;
    const bool narrow;
    Team team;
    Multiplier multiplier;
};

class Linear {
  public:
    Linear(const Matrix& matrix, std::shared_ptr<SharedTeam> all, std::shared_ptr<SharedTeam> alone)
        : m_(matrix), all_(std::move(all)), alone_(std::move(alone)) {}

    void multiply(const float* x, int64_t rows, float* y) {
        SharedTeam& shared = rows * m_.rows * m_.columns < LEAST_WORK ? *alone_ : *all_;
        Multiplier& multiplier = shared.multiplier;
        multiplier.reserve(rows);
        const int group = multiplier.group_of(rows, m_);
        const Grouped grouped{grouped_rows(x, rows, group), m_.columns, group};
        shared.team.run([&](int thread) {
            shape_tiles(rows);
            multiplier.block_sums(thread, grouped, rows);
            multiplier.run(thread, rows, grouped, m_.tiles(), 1, [&](int64_t unit) { return Place{&m_, unit}; },
                           [&](int64_t unit, int64_t row, int count, const float* a, const float* b, int stride) {
                               for (int i = 0; i < count; i++) {
                                   store(y + (row + i) * m_.rows, unit, a + i * stride);
                                   if (b) store(y + (row + i) * m_.rows, unit + 1, b + i * stride);
                               }
                           });
            shape_tiles(0);
        });
    }

  private:
    static constexpr int64_t LEAST_WORK = 2 << 20;  // multiplications; below, one thread is done before another is awake

    void store(float* row, int64_t tile, const float* values) const {
        std::memcpy(row + tile * TILE, values, static_cast<size_t>(std::min<int64_t>(TILE, m_.rows - tile * TILE)) * sizeof(float));
    }

    // x as it is where a group is one row, else put into groups.
    float* grouped_rows(const float* x, int64_t rows, int group) {
        if (group == 1) return const_cast<float*>(x);  // products only read
        grouped_.resize(static_cast<size_t>((rows + group - 1) / group * group * m_.columns));
        const Grouped to{grouped_.data(), m_.columns, group};
        for (int64_t row = 0; row < rows; row++) {
            float* column = to.column(row, 0);
            for (int64_t c = 0; c < m_.columns; c++) column[c * group] = x[row * m_.columns + c];
        }
        return grouped_.data();
    }

    const Matrix m_;
    std::shared_ptr<SharedTeam> all_, alone_;
    Floats grouped_;
};

}  // namespace
}  // namespace hp

extern "C" {

// One Matrix; its tiles are the caller's and must outlive the result. Null when memory or threads are wanting.
void* hp_linear_create(const void* tiles, int64_t threads, int64_t narrow) {
    try {
        const auto* matrix = static_cast<const hp::Matrix*>(tiles);
        const auto team = [&](int64_t count) { return hp::SharedTeam::get(static_cast<int>(count), matrix->columns, narrow != 0); };
        return new hp::Linear(*matrix, team(threads), team(1));
    } catch (...) {
        return nullptr;
    }
}

// x float32 [rows][columns] to y [rows][rows of the matrix]. 0 when done, 1 when memory is wanting.
int64_t hp_linear_multiply(void* linear, const float* x, int64_t rows, float* y) {
    try {
        static_cast<hp::Linear*>(linear)->multiply(x, rows, y);
        return 0;
    } catch (...) {
        return 1;
    }
}

void hp_linear_destroy(void* linear) { delete static_cast<hp::Linear*>(linear); }
}
