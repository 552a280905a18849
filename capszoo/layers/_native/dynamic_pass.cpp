// One iteration of dynamic routing in which the votes of a few children exist at a time, and the gradients. See
// dynamic_ops.py for the formulas; build.py compiles this file for each shape of a pose.
//
// Macros. D, E: pose dimension of children and parents; SCALAR: float or double, FLOAT: 1 or 0.
//
// STRIDE routings (images or windows) are a "group". In the iterations a vector has the LANES of them that fill a
// register; a transform is read once for all. In the gradients of children and transforms it has a row: elements of a
// pose. Axes, as in dynamic_ops.py: n routings, g groups of them, i children, j parents, d and e pose elements,
// l routings of a group.

#include "lanes.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace {

constexpr int TILE = BYTES == 64 ? 16 : 8;  // sums that are added to at a time: they stay in registers
constexpr int ROWS = TILE / 2;  // sums beside TILE vectors that stay in registers
constexpr int CHILDREN = 4;  // whose votes exist at a time: poses and sums are read once for all of them
constexpr int ROUTINGS = 256;  // whose gradients of the votes for a parent exist at a time

// f(first, N) for parts of N = PART numbers of 0 to SIZE, and for those left
template <int SIZE, int PART, typename F>
inline void in_parts(F f) {
    constexpr int LEFT = SIZE % PART;
    for (int k = 0; k < SIZE - LEFT; k += PART) f(k, std::integral_constant<int, PART>());
    if constexpr (LEFT > 0) f(SIZE - LEFT, std::integral_constant<int, LEFT>());
}

// Elements of a vector for rows of `size` elements: no more than are needed
constexpr int width_of(int size) {
    int width = 16 / sizeof(SCALAR);
    while (width < size && width < LANES) width *= 2;
    return width;
}

constexpr int padded(int size, int width) { return (size + width - 1) / width * width; }

constexpr int DW = width_of(D), EW = width_of(E), DP = padded(D, DW), EP = padded(E, EW);
typedef SCALAR drow __attribute__((vector_size(DW * sizeof(SCALAR))));
typedef SCALAR erow __attribute__((vector_size(EW * sizeof(SCALAR))));

// The first N elements; the others are zero
template <typename V, int N>
inline V read(const SCALAR* from) {
    V value = {};
    std::memcpy(&value, from, N * sizeof(SCALAR));
    return value;
}

template <int N, typename V>
inline void write(SCALAR* to, V value) {
    std::memcpy(to, &value, N * sizeof(SCALAR));
}

// Exchange the lanes of x whose number has bit S for those of y whose number has not
template <int S, int... L>
inline void exchange(vec& x, vec& y, std::integer_sequence<int, L...>) {
#ifdef __clang__
    const vec low = __builtin_shufflevector(x, y, (L & S ? LANES + (L ^ S) : L)...);
    y = __builtin_shufflevector(x, y, (L & S ? LANES + L : L ^ S)...);
#else
    typedef std::conditional_t<FLOAT, int32_t, int64_t> index __attribute__((vector_size(BYTES)));
    const vec low = __builtin_shuffle(x, y, index{(L & S ? LANES + (L ^ S) : L)...});
    y = __builtin_shuffle(x, y, index{(L & S ? LANES + L : L ^ S)...});
#endif
    x = low;
}

// LANES vectors, transposed
template <int S = LANES / 2>
inline void transpose(vec* x) {
    for (int k = 0; k < LANES; ++k)
        if (!(k & S)) exchange<S>(x[k], x[k + S], std::make_integer_sequence<int, LANES>());
    if constexpr (S > 1) transpose<S / 2>(x);
}

// Columns of `rows` (at most LANES) rows of SIZE elements that are `stride` apart, as vectors
template <int SIZE>
inline void read_columns(const SCALAR* from, int64_t stride, int64_t rows, vec* to) {
    in_parts<SIZE, LANES>([&](int first, auto size) {
        constexpr int N = size();
        vec x[LANES] = {};
        if (rows >= LANES)  // a constant number, which a compiler unrolls
            for (int r = 0; r < LANES; ++r) x[r] = read<vec, N>(from + r * stride + first);
        else
            for (int r = 0; r < rows; ++r) x[r] = read<vec, N>(from + r * stride + first);
        transpose(x);
        for (int c = 0; c < N; ++c) to[first + c] = x[c];
    });
}

// Votes [e] of a child [d] for a parent, through weight [d, e]. Returns their dot product with poses [e, l].
inline vec form_votes(const vec* x, const SCALAR* weight, const SCALAR* poses, vec* votes) {
    vec parts[4] = {};  // several sums: one would wait for each addition
    in_parts<E, TILE>([&](int first, auto size) {
        constexpr int N = size();
        vec sum[N] = {};
        for (int d = 0; d < D; ++d) {  // fetch the next parent's weights of a block
            __builtin_prefetch(weight + (CHILDREN * D + d) * E + first);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) sum[n] += x[d] * weight[d * E + first + n];
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            votes[first + n] = sum[n];
            parts[n % 4] += sum[n] * load(poses + (first + n) * STRIDE);
        }
    });
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Votes of N children, from x [i, d] and weight [j, i, d, e]; their dot products with poses [j, e, l], which
// `finish(child, products [j])` makes the weights with which the votes are added to sums [j, e]
template <int N, typename F>
inline void add_weighted_votes(
    const vec* x, const SCALAR* transforms, const SCALAR* poses, int64_t parents, vec* votes, vec* weights, vec* sums,
    F finish) {
    for (int64_t j = 0; j < parents; ++j)
        for (int n = 0; n < N; ++n)
            weights[n * parents + j] = form_votes(
                x + n * D, transforms + (j * N + n) * D * E, poses + j * E * STRIDE, votes + (j * N + n) * E);
    for (int n = 0; n < N; ++n) finish(n, weights + n * parents);
    for (int64_t j = 0; j < parents; ++j) {
        vec weight[N];  // read before the sums are written, which a compiler takes for the same memory
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) weight[n] = weights[n * parents + j];
        for (int e = 0; e < E; ++e) {
            vec sum = sums[j * E + e];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum += weight[n] * votes[(j * N + n) * E + e];
            sums[j * E + e] = sum;
        }
    }
}

// Sums of votes [g, j, e, l] of groups first to last, from x [n, i, d] and weight in blocks [j, i, d, e] of CHILDREN
// children, then of one; `finish(at, products)` as above, for couplings from `at` on
template <typename F>
inline void sum_votes(
    const SCALAR* x, const SCALAR* weight, const SCALAR* poses, int64_t first, int64_t last, int64_t routings,
    int64_t children, int64_t parents, SCALAR* to, F finish) {
    const int64_t width = parents * E;
    Memory<vec> child(CHILDREN * D), votes(CHILDREN * width), weights(CHILDREN * parents), sums(width);
    for (int64_t v = first * PARTS; v < last * PARTS; ++v) {
        sums.zero(width);
        int64_t i = 0;
        const auto step = [&](auto count) {
            constexpr int N = count();
            for (int n = 0; n < N; ++n)
                read_columns<D>(
                    x + (v * LANES * children + i + n) * D, children * D, routings - v * LANES, child.start + n * D);
            add_weighted_votes<N>(
                child.start, weight + i * width * D, poses + place(v, width), parents, votes.start, weights.start,
                sums.start,
                [&](int n, vec* products) { finish(place(v, children * parents) + (i + n) * parents * STRIDE, products); });
            i += N;
        };
        while (i + CHILDREN <= children) step(std::integral_constant<int, CHILDREN>());
        while (i < children) step(std::integral_constant<int, 1>());
        for (int64_t k = 0; k < width; ++k) store(to + place(v, width) + k * STRIDE, sums.start[k]);
    }
}

// What the gradients of the votes consist of, see dynamic_grads
struct Terms {
    const SCALAR *couplings, *grad_logits, *factors;
    int64_t iterations, groups, children, parents;
};

// Gradients [i, n, e] of the votes of N children from i on for parent j, of `count` routings from `begin` on
template <int N>
inline void form_grads(const Terms& of, int64_t i, int64_t j, int64_t begin, int64_t count, SCALAR* to) {
    const int64_t terms = 1 + 2 * of.iterations, step = of.parents * STRIDE;
    const SCALAR* factor = of.factors + (j * of.groups * STRIDE + begin) * terms * E;
    const int64_t iteration = of.groups * of.children * step;
    for (int64_t b = 0; b < count; b += STRIDE) {
        const int64_t group = ((begin + b) / STRIDE * of.children + i) * step + j * STRIDE;
        const SCALAR *couplings = of.couplings + group, *grad_logits = of.grad_logits + group;
        for (int64_t t = 0; t < of.iterations; ++t)
            for (int n = 0; n < N; ++n) {  // the next parent's
                __builtin_prefetch(couplings + t * iteration + n * step + STRIDE);
                __builtin_prefetch(grad_logits + t * iteration + n * step + STRIDE);
            }
        for (int l = 0; l < STRIDE; ++l, factor += terms * E)
            in_parts<E, EW>([&](int first, auto size) {
                erow sum[N];
                for (int n = 0; n < N; ++n) sum[n] = read<erow, size()>(factor + first);
                for (int64_t t = 0; t < of.iterations; ++t) {
                    const erow one = read<erow, size()>(factor + (1 + 2 * t) * E + first);
                    const erow two = read<erow, size()>(factor + (2 + 2 * t) * E + first);
                    const int64_t at = t * iteration + l;
                    for (int n = 0; n < N; ++n)
                        sum[n] += one * couplings[at + n * step] + two * grad_logits[at + n * step];
                }
                for (int n = 0; n < N; ++n) write<EW>(to + (n * ROUTINGS + b + l) * EP + first, sum[n]);
            });
    }
}

// Transform [d, e] as [e, d] with rows of DP
inline void transpose_weight(const SCALAR* from, SCALAR* to) {
    in_parts<D, DW>([&](int d, auto rows) {
        vec columns[padded(E, LANES)];
        read_columns<E>(from + d * E, E, rows(), columns);
        for (int e = 0; e < E; ++e) std::memcpy(to + e * DP + d, &columns[e], DW * sizeof(SCALAR));
    });
}

// Add weight [e, d] (columns of the transform) times grad [n, e], to [n, d]
inline void add_product(const SCALAR* weight, const SCALAR* grad, int64_t count, SCALAR* to) {
    for (int d = 0; d < D; d += DW)
        in_parts<E, TILE>([&](int first, auto size) {
            constexpr int N = size();
            drow column[N];
#pragma GCC unroll 16
            for (int e = 0; e < N; ++e) column[e] = read<drow, DW>(weight + (first + e) * DP + d);
            for (int64_t b = 0; b < count; b += ROWS) {
                drow sum[ROWS];
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) sum[r] = read<drow, DW>(to + (b + r) * DP + d);
#pragma GCC unroll 16
                for (int e = 0; e < N; ++e)
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; ++r) sum[r] += column[e] * grad[(b + r) * EP + first + e];
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) write<DW>(to + (b + r) * DP + d, sum[r]);
            }
        });
}

// Add the sum over n of x [n, d] * grad [n, e], to [d, e]
inline void add_outer(const SCALAR* x, const SCALAR* grad, int64_t count, SCALAR* to) {
    in_parts<E, EW>([&](int e, auto columns) {
        in_parts<D, TILE>([&](int first, auto size) {
            constexpr int N = size(), M = columns();
            erow sum[N] = {};
            for (int64_t b = 0; b < count; ++b) {
                const erow row = read<erow, EW>(grad + b * EP + e);
#pragma GCC unroll 16
                for (int d = 0; d < N; ++d) sum[d] += row * x[b * D + first + d];
            }
#pragma GCC unroll 16
            for (int d = 0; d < N; ++d) {
                SCALAR* at = to + (first + d) * E + e;
                write<M>(at, read<erow, M>(at) + sum[d]);
            }
        });
    });
}

}  // namespace

// For groups first to last: totals [g, j, e, l] and couplings [g, i, j, l], from x [n, i, d], weight as in sum_votes and
// poses [g, j, e, l]
extern "C" void dynamic_pass(
    const SCALAR* x, const SCALAR* weight, const SCALAR* poses, int64_t first, int64_t last, int64_t routings,
    int64_t children, int64_t parents, SCALAR* totals, SCALAR* couplings) {
    sum_votes(x, weight, poses, first, last, routings, children, parents, totals, [&](int64_t at, vec* c) {
        softmax(c, parents);
        for (int64_t j = 0; j < parents; ++j) store(couplings + at + j * STRIDE, c[j]);
    });
}

// Gradients of the logits [g, i, j, l] and of the poses [g, j, e, l], from those of totals and couplings (or null)
extern "C" void dynamic_pass_backward(
    const SCALAR* x, const SCALAR* weight, const SCALAR* couplings, const SCALAR* grad_totals,
    const SCALAR* grad_couplings, int64_t first, int64_t last, int64_t routings, int64_t children, int64_t parents,
    SCALAR* grad_logits, SCALAR* grad_poses) {
    sum_votes(x, weight, grad_totals, first, last, routings, children, parents, grad_poses, [&](int64_t at, vec* grad) {
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

// Gradients of x and weight (as in sum_votes; weight's are zero before) for blocks first to last of CHILDREN children.
// The gradient of the votes is factors[j, n, 0] plus the sum over t of couplings[t] * factors[j, n, 1 + 2 t] +
// grad_logits[t] * factors[j, n, 2 + 2 t]: couplings and grad_logits [t, g, i, j, l], factors [j, n, 1 + 2 t, e] with
// whole groups.
extern "C" void dynamic_grads(
    const SCALAR* x, const SCALAR* weight, const SCALAR* couplings, const SCALAR* grad_logits, const SCALAR* factors,
    int64_t first, int64_t last, int64_t routings, int64_t children, int64_t parents, int64_t iterations,
    int64_t groups, SCALAR* grad_x, SCALAR* grad_weight) {
    const Terms terms = {couplings, grad_logits, factors, iterations, groups, children, parents};
    Memory<SCALAR> of_x(CHILDREN * ROUTINGS * D), of_child(CHILDREN * ROUTINGS * DP), of_votes(CHILDREN * ROUTINGS * EP);
    Memory<SCALAR> columns(padded(E, LANES) * DP);
    for (int64_t begin = 0; begin < groups * STRIDE; begin += ROUTINGS) {
        const int64_t count = std::min<int64_t>(ROUTINGS, groups * STRIDE - begin);
        const int64_t valid = std::min(count, routings - begin);
        int64_t i = first * CHILDREN;
        const auto step = [&](auto number) {
            constexpr int N = number();
            const auto place_of = [&](int n, int64_t b) { return ((begin + b) * children + i + n) * D; };
            of_x.zero(N * ROUTINGS * D);
            of_child.zero(N * ROUTINGS * DP);
            for (int64_t b = 0; b < valid; ++b)
                for (int n = 0; n < N; ++n)
                    std::memcpy(of_x.start + (n * ROUTINGS + b) * D, x + place_of(n, b), D * sizeof(SCALAR));
            for (int64_t j = 0; j < parents; ++j) {
                form_grads<N>(terms, i, j, begin, count, of_votes.start);
                for (int n = 0; n < N; ++n) {
                    const int64_t transform = (i * parents + j * N + n) * D * E;
                    const SCALAR* grad = of_votes.start + n * ROUTINGS * EP;
                    for (int k = D * E; k < 2 * D * E; k += STRIDE) {  // the next transform
                        __builtin_prefetch(weight + transform + k);
                        __builtin_prefetch(grad_weight + transform + k, 1);
                    }
                    transpose_weight(weight + transform, columns.start);
                    add_product(columns.start, grad, count, of_child.start + n * ROUTINGS * DP);
                    add_outer(of_x.start + n * ROUTINGS * D, grad, count, grad_weight + transform);
                }
            }
            for (int64_t b = 0; b < valid; ++b)
                for (int n = 0; n < N; ++n)
                    std::memcpy(grad_x + place_of(n, b), of_child.start + (n * ROUTINGS + b) * DP, D * sizeof(SCALAR));
            i += N;
        };
        const int64_t end = std::min(last * CHILDREN, children);
        while (i + CHILDREN <= end) step(std::integral_constant<int, CHILDREN>());
        while (i < end) step(std::integral_constant<int, 1>());
    }
}
