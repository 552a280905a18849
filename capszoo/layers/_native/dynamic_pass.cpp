// One iteration of dynamic routing in which the votes of a few children exist at a time, and the gradients. See
// dynamic_ops.py for the formulas; build.py compiles this file for each shape of a pose.
//
// Macros. D, E: pose dimension of children and parents; SCALAR: float or double, FLOAT: 1 or 0.
//
// STRIDE routings (images or windows) are a "group". A vector has the LANES of them that fill a register; a transform is
// read once for all. Axes, as in dynamic_ops.py: g groups, i children, j parents, d and e pose elements, l routings.

#include "lanes.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace {

constexpr int TILE = BYTES == 64 ? 16 : 8;  // sums that are added to at a time: they stay in registers
constexpr int CHILDREN = 4;  // whose votes exist at a time: poses and sums are read once for all of them
constexpr int VECTORS = 32;  // of routings, whose gradients of the votes for a parent exist at a time

// f(first, N) for tiles of N = TILE numbers of 0 to SIZE, and for those left
template <int SIZE, typename F>
inline void in_tiles(F f) {
    constexpr int LEFT = SIZE % TILE;
    for (int k = 0; k < SIZE - LEFT; k += TILE) f(k, std::integral_constant<int, TILE>());
    if constexpr (LEFT > 0) f(SIZE - LEFT, std::integral_constant<int, LEFT>());
}

// Votes [e] of a child [d, l] for a parent, through weight [d, e]. Returns their dot product with poses [e, l].
inline vec form_votes(const SCALAR* x, const SCALAR* weight, const SCALAR* poses, vec* votes) {
    vec parts[4] = {};  // several sums: one would wait for each addition
    in_tiles<E>([&](int first, auto size) {
        constexpr int N = size();
        vec sum[N] = {};
        for (int d = 0; d < D; ++d) {
            const vec u = load(x + d * STRIDE);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) sum[n] += u * weight[d * E + first + n];
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            votes[first + n] = sum[n];
            parts[n % 4] += sum[n] * load(poses + (first + n) * STRIDE);
        }
    });
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Votes of N children, from x [i, d, l] and weight [i, j, d, e]; their dot products with poses [j, e, l], which
// `finish(child, products [j])` makes the weights with which the votes are added to sums [j, e]
template <int N, typename F>
inline void add_weighted_votes(
    const SCALAR* x, const SCALAR* weight, const SCALAR* poses, int64_t parents, vec* votes, vec* weights, vec* sums,
    F finish) {
    const int64_t width = parents * E;
    for (int64_t j = 0; j < parents; ++j)
        for (int n = 0; n < N; ++n)
            weights[n * parents + j] = form_votes(
                x + n * D * STRIDE, weight + (n * parents + j) * D * E, poses + j * E * STRIDE,
                votes + n * width + j * E);
    for (int n = 0; n < N; ++n) finish(n, weights + n * parents);
    for (int64_t j = 0; j < parents; ++j)
        for (int e = 0; e < E; ++e) {
            vec sum = sums[j * E + e];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum += weights[n * parents + j] * votes[n * width + j * E + e];
            sums[j * E + e] = sum;
        }
}

// Sums of votes [g, j, e, l] of groups first to last; `finish(at, products)` as above, for couplings from `at` on
template <typename F>
inline void sum_votes(
    const SCALAR* x, const SCALAR* weight, const SCALAR* poses, int64_t first, int64_t last, int64_t children,
    int64_t parents, SCALAR* to, F finish) {
    const int64_t width = parents * E;
    Memory votes(CHILDREN * width), weights(CHILDREN * parents), sums(width);
    for (int64_t v = first * PARTS; v < last * PARTS; ++v) {
        sums.zero(width);
        int64_t i = 0;
        const auto step = [&](auto count) {
            constexpr int N = count();
            add_weighted_votes<N>(
                x + place(v, children * D) + i * D * STRIDE, weight + i * width * D, poses + place(v, width), parents,
                votes.start, weights.start, sums.start,
                [&](int n, vec* products) { finish(place(v, children * parents) + (i + n) * parents * STRIDE, products); });
            i += N;
        };
        while (i + CHILDREN <= children) step(std::integral_constant<int, CHILDREN>());
        while (i < children) step(std::integral_constant<int, 1>());
        for (int64_t k = 0; k < width; ++k) store(to + place(v, width) + k * STRIDE, sums.start[k]);
    }
}

// Lane l of the result: lanes l and l ^ S of x, added, where l has not the bit S; else of y
template <int S, int... L>
inline vec fold(vec x, vec y, std::integer_sequence<int, L...>) {
#ifdef __clang__
    return __builtin_shufflevector(x, y, (L & S ? LANES + L : L)...) +
           __builtin_shufflevector(x, y, (L & S ? LANES + (L ^ S) : L ^ S)...);
#else
    typedef std::conditional_t<FLOAT, int32_t, int64_t> index __attribute__((vector_size(BYTES)));
    return __builtin_shuffle(x, y, index{(L & S ? LANES + L : L)...}) +
           __builtin_shuffle(x, y, index{(L & S ? LANES + (L ^ S) : L ^ S)...});
#endif
}

// Lane l of the result: the total of vector l of LANES vectors, which are overwritten
template <int S = LANES / 2>
inline vec vector_of_totals(vec* x) {
    for (int n = 0; n < S; ++n) x[n] = fold<S>(x[n], x[n + S], std::make_integer_sequence<int, LANES>());
    if constexpr (S > 1) return vector_of_totals<S / 2>(x);
    return x[0];
}

// Add sum over b and lanes of x[b, d] * grad[b, e], to [d, e]
inline void add_outer(const vec* x, const vec* grad, int64_t count, SCALAR* to) {
    constexpr int COLUMNS = std::min(4, LANES), ROWS = LANES / COLUMNS;
    for (int e = 0; e < E; e += COLUMNS)
        for (int d = 0; d < D; d += ROWS) {
            vec sum[LANES] = {};
            for (int64_t b = 0; b < count; ++b) {
                vec left[ROWS], right[COLUMNS];
                for (int r = 0; r < ROWS; ++r) left[r] = x[b * D + std::min(d + r, D - 1)];
                for (int c = 0; c < COLUMNS; ++c) right[c] = grad[b * E + std::min(e + c, E - 1)];
                for (int r = 0; r < ROWS; ++r)
                    for (int c = 0; c < COLUMNS; ++c) sum[r * COLUMNS + c] += left[r] * right[c];
            }
            const vec all = vector_of_totals(sum);
            for (int r = 0; r < ROWS && d + r < D; ++r)
                for (int c = 0; c < COLUMNS && e + c < E; ++c) to[(d + r) * E + e + c] += all[r * COLUMNS + c];
        }
}

// Add weight [d, e] times grad [e], to [d]
inline void add_product(const SCALAR* weight, const vec* grad, vec* to) {
    in_tiles<D>([&](int first, auto size) {
        constexpr int N = size();
        vec sum[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sum[n] = to[first + n];
        for (int e = 0; e < E; ++e) {
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) sum[n] += grad[e] * weight[(first + n) * E + e];
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) to[first + n] = sum[n];
    });
}

}  // namespace

// For groups first to last: totals [g, j, e, l] and couplings [g, i, j, l], from x [g, i, d, l], weight [i, j, d, e] and
// poses [g, j, e, l]
extern "C" void dynamic_pass(
    const SCALAR* x, const SCALAR* weight, const SCALAR* poses, int64_t first, int64_t last, int64_t children,
    int64_t parents, SCALAR* totals, SCALAR* couplings) {
    sum_votes(x, weight, poses, first, last, children, parents, totals, [&](int64_t at, vec* c) {
        softmax(c, parents);
        for (int64_t j = 0; j < parents; ++j) store(couplings + at + j * STRIDE, c[j]);
    });
}

// Gradients of the logits [g, i, j, l] and of the poses [g, j, e, l], from those of totals and couplings (or null)
extern "C" void dynamic_pass_backward(
    const SCALAR* x, const SCALAR* weight, const SCALAR* couplings, const SCALAR* grad_totals,
    const SCALAR* grad_couplings, int64_t first, int64_t last, int64_t children, int64_t parents, SCALAR* grad_logits,
    SCALAR* grad_poses) {
    sum_votes(x, weight, grad_totals, first, last, children, parents, grad_poses, [&](int64_t at, vec* grad) {
        vec expected = {};
        for (int64_t j = 0; j < parents; ++j) {
            if (grad_couplings) grad[j] += load(grad_couplings + at + j * STRIDE);
            expected += grad[j] * load(couplings + at + j * STRIDE);
        }
        for (int64_t j = 0; j < parents; ++j) {
            grad[j] = load(couplings + at + j * STRIDE) * (grad[j] - expected);
            store(grad_logits + at + j * STRIDE, grad[j]);
        }
    });
}

// Gradients of children first to last [g, i, d, l] and of their transforms [i, j, d, e] (which are zero before), from
// x and weight as above. The gradient of the votes is factors[j, g, 0] plus the sum over t of couplings[t] *
// factors[j, g, 1 + 2 t] + grad_logits[t] * factors[j, g, 2 + 2 t]: couplings and grad_logits [t, g, i, j, l], factors
// [j, g, 1 + 2 t, e, l].
extern "C" void dynamic_grads(
    const SCALAR* x, const SCALAR* weight, const SCALAR* couplings, const SCALAR* grad_logits, const SCALAR* factors,
    int64_t first, int64_t last, int64_t children, int64_t parents, int64_t iterations, int64_t groups, SCALAR* grad_x,
    SCALAR* grad_weight) {
    Memory child(VECTORS * D), of_child(VECTORS * D), of_votes(VECTORS * E);
    for (int64_t begin = 0; begin < groups * PARTS; begin += VECTORS) {
        const int64_t count = std::min<int64_t>(VECTORS, groups * PARTS - begin);
        for (int64_t i = first; i < last; ++i) {
            const auto at = [&](int64_t b) { return place(begin + b, children * D) + i * D * STRIDE; };
            for (int64_t b = 0; b < count; ++b)
                for (int d = 0; d < D; ++d) child.start[b * D + d] = load(x + at(b) + d * STRIDE);
            of_child.zero(count * D);
            for (int64_t j = 0; j < parents; ++j) {
                const SCALAR* w = weight + (i * parents + j) * D * E;
                for (int64_t b = 0; b < count; ++b) {
                    const int64_t v = begin + b;
                    const SCALAR* factor = factors + place(j * groups * PARTS + v, (1 + 2 * iterations) * E);
                    vec sum[E], *grad = of_votes.start + b * E;
                    for (int e = 0; e < E; ++e) sum[e] = load(factor + e * STRIDE);
                    for (int64_t t = 0; t < iterations; ++t) {
                        const int64_t coupling =
                            place(t * groups * PARTS + v, children * parents) + (i * parents + j) * STRIDE;
                        const SCALAR *one = factor + (1 + 2 * t) * E * STRIDE, *two = one + E * STRIDE;
                        const vec c = load(couplings + coupling), of_logit = load(grad_logits + coupling);
                        for (int e = 0; e < E; ++e)
                            sum[e] += c * load(one + e * STRIDE) + of_logit * load(two + e * STRIDE);
                    }
                    for (int e = 0; e < E; ++e) grad[e] = sum[e];
                    add_product(w, grad, of_child.start + b * D);
                }
                add_outer(child.start, of_votes.start, count, grad_weight + (i * parents + j) * D * E);
            }
            for (int64_t b = 0; b < count; ++b)
                for (int d = 0; d < D; ++d) store(grad_x + at(b) + d * STRIDE, of_child.start[b * D + d]);
        }
    }
}
