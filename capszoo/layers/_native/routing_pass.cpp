// One iteration of routing in which votes exist only for some children of one routing: see ops.py, which compiles this
// file for each shape of a pose.
//
// P, Q, R: rows of a pose, columns of a child's and of a parent's; SCALAR: float or double, FLOAT: 1 or 0; SQUARES: 1 if
// the E-step and the M-step read the squares of the votes.
//
// A vector has LANES children; tensors of children have the axes [block, ..., lane], with STRIDE children in a block.
// Letters: n routings, c vectors of children, j parents, h pose elements (P * R).

#include "lanes.h"

#include <algorithm>

namespace {

constexpr int H = P * R;

inline vec added(const vec (&x)[R]) {
    vec sum = x[0];
    for (int r = 1; r < R; ++r) sum += x[r];
    return sum;
}

// What one routing reads
struct Routing {
    const SCALAR *rows, *activations, *weight;      // [c, p, q, l], [c, l], [c, j, q, r, l]
    const SCALAR *mean, *precision, *pull, *height;  // [j, h] three times, [j]; no height: even couplings; no pull: zero
    int64_t children, parents;
    SCALAR idle;

    int64_t padded() const { return (children + STRIDE - 1) / STRIDE * STRIDE; }
    int64_t vectors() const { return padded() / LANES; }

    // Routing n, of those that start here
    Routing at(int64_t n) const {
        const int64_t poses = n * parents * H;
        Routing one = *this;
        one.rows += n * padded() * P * Q;
        one.activations += n * padded();
        one.mean += poses;
        if (precision) one.precision += poses;
        if (pull) one.pull += poses;
        if (height) one.height += n * parents;
        return one;
    }

    // 1 where a lane has a child, else 0
    vec present(int64_t c) const {
        vec mask = splat(1);
        for (int64_t l = std::max<int64_t>(0, children - c * LANES); l < LANES; ++l) mask[l] = 0;
        return mask;
    }

    // Votes [j, h] of vector c about `mean`, sum_q rows[p][q] * weight[q][r] - mean[p][r], and their couplings [j]
    void couple(int64_t c, vec* votes, vec* coupling) const {
        const SCALAR* u = rows + place(c, P * Q);
        for (int64_t j = 0; j < parents; ++j) {
            const SCALAR *t = weight + place(c, parents * Q * R) + j * Q * R * STRIDE, *m = mean + j * H;
            vec *v = votes + j * H, logit[R] = {};  // several sums: one would wait for each addition
            for (int p = 0; p < P; ++p) {
                vec sum[R];
                for (int r = 0; r < R; ++r) sum[r] = load(u + p * Q * STRIDE) * load(t + r * STRIDE) - m[p * R + r];
                for (int q = 1; q < Q; ++q)
                    for (int r = 0; r < R; ++r)
                        sum[r] += load(u + (p * Q + q) * STRIDE) * load(t + (q * R + r) * STRIDE);
                for (int r = 0; r < R; ++r) v[p * R + r] = sum[r];
                if (!height) continue;
                [[maybe_unused]] const SCALAR* toward = pull + (pull ? j * H + p * R : 0);
#if SQUARES
                const SCALAR* sharp = precision + j * H + p * R;
                if (pull)
                    for (int r = 0; r < R; ++r) logit[r] += sum[r] * (toward[r] - sum[r] * sharp[r]);
                else
                    for (int r = 0; r < R; ++r) logit[r] -= sum[r] * (sum[r] * sharp[r]);
#else
                for (int r = 0; r < R; ++r) logit[r] += sum[r] * toward[r];
#endif
            }
            coupling[j] = height ? added(logit) + height[j] : splat(SCALAR(1) / parents);
        }
        if (height) softmax(coupling, parents);
    }

    vec active(int64_t c) const { return load(activations + place(c, 1)); }
};

// Add the weighted sums of the votes of one vector, and of their squares: [j, h], weights [j]
inline void add_moments(
    const vec* votes, const vec* weights, vec* first, [[maybe_unused]] vec* second, int64_t parents) {
    for (int64_t j = 0; j < parents; ++j)
        for (int h = 0; h < H; ++h) {
            const vec v = votes[j * H + h], weighted = weights[j] * v;
            first[j * H + h] += weighted;
#if SQUARES
            second[j * H + h] += weighted * v;
#endif
        }
}

void totals(const vec* from, SCALAR* to, int64_t count) {
    for (int64_t k = 0; k < count; ++k) to[k] = total(from[k]);
}

}  // namespace

extern "C" void routing_pass(
    const SCALAR* rows, const SCALAR* activations, const SCALAR* weight, const SCALAR* mean, const SCALAR* precision,
    const SCALAR* pull, const SCALAR* height, double idle, int64_t first, int64_t last, int64_t children,
    int64_t parents, SCALAR* mass, SCALAR* sums, SCALAR* squares, SCALAR* couplings) {
    const int64_t poses = parents * H;
    Memory<vec> votes(poses), one(poses), two(SQUARES ? poses : 0), heavy(parents);
    Memory<vec> weights(parents);
    const Routing all = {rows, activations, weight, mean, precision, pull, height, children, parents, SCALAR(idle)};
    for (int64_t n = first; n < last; ++n) {
        const Routing routing = all.at(n);
        one.zero(poses);
        if (SQUARES) two.zero(poses);
        heavy.zero(parents);
        for (int64_t c = 0; c < routing.vectors(); ++c) {
            vec* w = weights.start;
            routing.couple(c, votes.start, w);
            const vec present = routing.present(c), active = routing.active(c);
            for (int64_t j = 0; j < parents; ++j) {
                if (couplings) {
                    SCALAR* to = couplings + (n * parents + j) * children + c * LANES;
                    for (int64_t l = 0; l < LANES && c * LANES + l < children; ++l) to[l] = w[j][l];
                }
                w[j] = present * (w[j] * active + routing.idle);
                heavy.start[j] += w[j];
            }
            add_moments(votes.start, w, one.start, two.start, parents);
        }
        totals(heavy.start, mass + n * parents, parents);
        totals(one.start, sums + n * poses, poses);
        if (SQUARES) totals(two.start, squares + n * poses, poses);
    }
}

// grad_weight is added to; all other results are written
extern "C" void routing_pass_backward(
    const SCALAR* rows, const SCALAR* activations, const SCALAR* weight, const SCALAR* mean, const SCALAR* precision,
    const SCALAR* pull, const SCALAR* height, double idle, int64_t first, int64_t last, int64_t children,
    int64_t parents, const SCALAR* mass, const SCALAR* sums, const SCALAR* grad_mass, const SCALAR* grad_sums,
    const SCALAR* grad_squares, const SCALAR* grad_couplings, SCALAR* grad_rows, SCALAR* grad_activations,
    SCALAR* grad_weight, SCALAR* grad_mean, SCALAR* grad_precision, SCALAR* grad_pull, SCALAR* grad_height) {
    const int64_t poses = parents * H;
    Memory<vec> votes(poses), one(poses), two(SQUARES ? poses : 0), heavy(parents);
    Memory<vec> weights(parents), logits(parents), given(parents);
    const Routing all = {rows, activations, weight, mean, precision, pull, height, children, parents, SCALAR(idle)};
    for (int64_t n = first; n < last; ++n) {
        const Routing routing = all.at(n);
        const SCALAR *g_mass = grad_mass + n * parents, *g_sums = grad_sums + n * poses,
                     *g_squares = grad_squares + n * poses;
        one.zero(poses);
        if (SQUARES) two.zero(poses);
        heavy.zero(parents);
        for (int64_t c = 0; c < routing.vectors(); ++c) {
            vec *w = weights.start, *g_logit = logits.start, *g = given.start;
            routing.couple(c, votes.start, w);
            const vec present = routing.present(c), active = routing.active(c);
            // gradients of the weights, then of the couplings and activations
            vec g_active = {}, mean_g = {};
            for (int64_t j = 0; j < parents; ++j) {
                vec parts[R] = {};
                for (int h = 0; h < H; ++h) {
                    const vec v = votes.start[j * H + h];
#if SQUARES
                    parts[h % R] += v * (v * g_squares[j * H + h] + g_sums[j * H + h]);
#else
                    parts[h % R] += v * g_sums[j * H + h];
#endif
                }
                const vec g_weight = present * (added(parts) + g_mass[j]);
                g_active += g_weight * w[j];
                g[j] = g_weight * active;
                if (grad_couplings) {
                    const SCALAR* from = grad_couplings + (n * parents + j) * children + c * LANES;
                    for (int64_t l = 0; l < LANES && c * LANES + l < children; ++l) g[j][l] += from[l];
                }
                mean_g += g[j] * w[j];
            }
            store(grad_activations + n * routing.padded() + place(c, 1), g_active);
            for (int64_t j = 0; j < parents; ++j) {
                g_logit[j] = height ? w[j] * (g[j] - mean_g) : vec{};
                heavy.start[j] += g_logit[j];
                w[j] = present * (w[j] * active + routing.idle);
            }
            if (height) add_moments(votes.start, g_logit, one.start, two.start, parents);
            // gradients of the votes, of poses and transforms
            const SCALAR* u = routing.rows + place(c, P * Q);
            vec g_rows[P * Q] = {};
            for (int64_t j = 0; j < parents; ++j) {
                [[maybe_unused]] const vec* v = votes.start + j * H;
                const int64_t transform = place(c, parents * Q * R) + j * Q * R * STRIDE;
                const SCALAR *t = weight + transform, *g1 = g_sums + j * H;
                SCALAR* g_t = grad_weight + transform;
                vec g_v[H];
                for (int h = 0; h < H; ++h) {
                    g_v[h] = w[j] * g1[h];
#if SQUARES
                    vec twice = w[j] * g_squares[j * H + h];
                    if (pull) g_v[h] += g_logit[j] * routing.pull[j * H + h];
                    if (height) twice -= g_logit[j] * routing.precision[j * H + h];
                    g_v[h] += (v[h] + v[h]) * twice;
#else
                    if (pull) g_v[h] += g_logit[j] * routing.pull[j * H + h];
#endif
                }
                for (int p = 0; p < P; ++p)
                    for (int q = 0; q < Q; ++q)
                        for (int r = 0; r < R; ++r)
                            g_rows[p * Q + q] += g_v[p * R + r] * load(t + (q * R + r) * STRIDE);
                for (int q = 0; q < Q; ++q)
                    for (int r = 0; r < R; ++r) {
                        vec sum = load(g_t + (q * R + r) * STRIDE);
                        for (int p = 0; p < P; ++p) sum += g_v[p * R + r] * load(u + (p * Q + q) * STRIDE);
                        store(g_t + (q * R + r) * STRIDE, sum);
                    }
            }
            SCALAR* to = grad_rows + n * routing.padded() * P * Q + place(c, P * Q);
            for (int k = 0; k < P * Q; ++k) store(to + k * STRIDE, g_rows[k]);
        }
        // the votes are about `mean`: its gradient is minus their sum, which the sums above determine
        SCALAR* g_mean = grad_mean + n * poses;
        for (int64_t j = 0; j < parents; ++j) {
            const SCALAR g_height = height ? total(heavy.start[j]) : 0;
            if (height) grad_height[n * parents + j] = g_height;
            for (int h = 0; h < H; ++h) {
                const int64_t k = j * H + h;
                SCALAR sum = g_sums[k] * mass[n * parents + j];
                if (SQUARES) sum += 2 * g_squares[k] * sums[n * poses + k];
                if (height) {
                    const SCALAR g_pull = total(one.start[k]);
                    if (pull) {
                        grad_pull[n * poses + k] = g_pull;
                        sum += routing.pull[k] * g_height;
                    }
                    if (SQUARES) {
                        grad_precision[n * poses + k] = -total(two.start[k]);
                        sum -= 2 * routing.precision[k] * g_pull;
                    }
                }
                g_mean[k] = -sum;
            }
        }
    }
}
