// One iteration of dynamic routing in which the votes of one child exist at a time. See dynamic_ops.py for the formulas;
// build.py compiles this file for each shape of a pose.
//
// Macros. D, E: pose dimension of children and parents; SCALAR: float or double, FLOAT: 1 or 0.
//
// A vector has LANES routings (images or windows), which are a "group": a transform is read once for all of them. Axes,
// as in dynamic_ops.py: g groups, i children, j parents, d and e pose elements, l lanes.

#include "lanes.h"

namespace {

// Votes [j, e] of child i of group g, from x [g, i, d, l] and weight [i, d, j, e]
inline void form_votes(
    const SCALAR* x, const SCALAR* weight, int64_t g, int64_t i, int64_t children, int64_t parents, vec* votes) {
    vec u[D];
    for (int d = 0; d < D; ++d) u[d] = load(x + ((g * children + i) * D + d) * LANES);
    const int64_t width = parents * E;
    const SCALAR* w = weight + i * D * width;
    for (int64_t k = 0; k < width; ++k) {
        vec sum = u[0] * w[k];
        for (int d = 1; d < D; ++d) sum += u[d] * w[d * width + k];
        votes[k] = sum;
    }
}

inline vec dot(const vec* votes, const SCALAR* poses) {
    constexpr int PARTS = E % 4 ? 1 : 4;  // several sums: one would wait for each addition
    vec sum[PARTS] = {};
    for (int e = 0; e < E; ++e) sum[e % PARTS] += votes[e] * load(poses + e * LANES);
    vec all = sum[0];
    for (int k = 1; k < PARTS; ++k) all += sum[k];
    return all;
}

inline void add_weighted(const vec* weights, const vec* votes, vec* sums, int64_t parents) {
    for (int64_t j = 0; j < parents; ++j)
        for (int e = 0; e < E; ++e) sums[j * E + e] += weights[j] * votes[j * E + e];
}

inline void store_all(const vec* from, SCALAR* to, int64_t count) {
    for (int64_t k = 0; k < count; ++k) store(to + k * LANES, from[k]);
}

}  // namespace

// For groups first to last: totals [g, j, e, l] and couplings [g, i, j, l], from poses [g, j, e, l]
extern "C" void dynamic_pass(
    const SCALAR* x, const SCALAR* weight, const SCALAR* poses, int64_t first, int64_t last, int64_t children,
    int64_t parents, SCALAR* totals, SCALAR* couplings) {
    const int64_t width = parents * E;
    Memory votes(width), sums(width), c(parents);
    for (int64_t g = first; g < last; ++g) {
        sums.zero(width);
        for (int64_t i = 0; i < children; ++i) {
            form_votes(x, weight, g, i, children, parents, votes.start);
            for (int64_t j = 0; j < parents; ++j)
                c.start[j] = dot(votes.start + j * E, poses + (g * width + j * E) * LANES);
            softmax(c.start, parents);
            store_all(c.start, couplings + (g * children + i) * parents * LANES, parents);
            add_weighted(c.start, votes.start, sums.start, parents);
        }
        store_all(sums.start, totals + g * width * LANES, width);
    }
}

// Gradients of the logits [g, i, j, l] and of the poses [g, j, e, l], from those of totals and couplings (or null)
extern "C" void dynamic_pass_backward(
    const SCALAR* x, const SCALAR* weight, const SCALAR* couplings, const SCALAR* grad_totals,
    const SCALAR* grad_couplings, int64_t first, int64_t last, int64_t children, int64_t parents, SCALAR* grad_logits,
    SCALAR* grad_poses) {
    const int64_t width = parents * E;
    Memory votes(width), sums(width), logits(parents);
    for (int64_t g = first; g < last; ++g) {
        sums.zero(width);
        for (int64_t i = 0; i < children; ++i) {
            form_votes(x, weight, g, i, children, parents, votes.start);
            const int64_t at = (g * children + i) * parents * LANES;
            vec expected = {};
            for (int64_t j = 0; j < parents; ++j) {
                vec grad = dot(votes.start + j * E, grad_totals + (g * width + j * E) * LANES);
                if (grad_couplings) grad += load(grad_couplings + at + j * LANES);
                expected += grad * load(couplings + at + j * LANES);
                logits.start[j] = grad;
            }
            for (int64_t j = 0; j < parents; ++j)
                logits.start[j] = load(couplings + at + j * LANES) * (logits.start[j] - expected);
            store_all(logits.start, grad_logits + at, parents);
            add_weighted(logits.start, votes.start, sums.start, parents);
        }
        store_all(sums.start, grad_poses + g * width * LANES, width);
    }
}

// Gradient of the votes of children first to last: even [g, j, e, l] plus the sum over `terms` of left [t, g, i, j, l] *
// right [t, g, j, e, l], to [i, j, e, k], in which k counts the routings of `count` groups from `begin`
extern "C" void dynamic_grad_votes(
    const SCALAR* even, const SCALAR* left, const SCALAR* right, int64_t first, int64_t last, int64_t children,
    int64_t parents, int64_t terms, int64_t groups, int64_t begin, int64_t count, SCALAR* grad) {
    for (int64_t i = first; i < last; ++i)
        for (int64_t k = 0; k < count; ++k)
            for (int64_t j = 0; j < parents; ++j) {
                vec sum[E];
                for (int e = 0; e < E; ++e) sum[e] = load(even + (((begin + k) * parents + j) * E + e) * LANES);
                for (int64_t t = 0; t < terms; ++t) {
                    const int64_t g = t * groups + begin + k;
                    const vec factor = load(left + ((g * children + i) * parents + j) * LANES);
                    for (int e = 0; e < E; ++e) sum[e] += factor * load(right + ((g * parents + j) * E + e) * LANES);
                }
                for (int e = 0; e < E; ++e) store(grad + (((i * parents + j) * E + e) * count + k) * LANES, sum[e]);
            }
}
