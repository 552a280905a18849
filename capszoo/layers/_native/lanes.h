// Vectors by the vector extensions of g++ and clang++, for SCALAR (float or double) and FLOAT (1 or 0).

#pragma once

#if defined(__AVX512F__)
#define BYTES 64  // of a vector: a register, since g++ keeps wider vectors in memory
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int LANES = BYTES / sizeof(SCALAR);
// Tensors have blocks of STRIDE elements along their last axis, whatever the processor: PARTS vectors each
constexpr int STRIDE = 64 / sizeof(SCALAR), PARTS = STRIDE / LANES;

typedef SCALAR vec __attribute__((vector_size(BYTES)));
typedef SCALAR loose __attribute__((vector_size(BYTES), aligned(sizeof(SCALAR)), may_alias));

inline vec load(const SCALAR* from) { return *reinterpret_cast<const loose*>(from); }
inline void store(SCALAR* to, vec value) { *reinterpret_cast<loose*>(to) = value; }
// Place of vector v in a tensor [block, rows, STRIDE]
inline int64_t place(int64_t v, int64_t rows) { return v / PARTS * rows * STRIDE + v % PARTS * LANES; }
inline vec splat(SCALAR value) { return value - vec{}; }

inline SCALAR total(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; ++l) x[l] += x[l + half];
    return x[0];
}

#if FLOAT
typedef int32_t whole __attribute__((vector_size(BYTES)));

// exp of values of at most 0, within 2 units in the last place down to -87 and constant below; NaN stays NaN
inline vec exponential(vec x) {
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: its sum with a number has no fraction
    const vec k = (x * 1.44269504088896341f + magic) - magic;
    vec r = x - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const whole power = (__builtin_convertvector(k, whole) + 127) << 23;
    return y * (vec)power;  // a cast between vectors keeps the bits
}
#else
inline vec exponential(vec x) {
    for (int l = 0; l < LANES; ++l) x[l] = std::exp(x[l]);
    return x;
}
#endif

template <typename T>
struct Memory {
    T* start;
    explicit Memory(size_t count) : start(static_cast<T*>(std::aligned_alloc(64, count * sizeof(T) / 64 * 64 + 64))) {}
    ~Memory() { std::free(start); }
    void zero(size_t count) { std::memset(static_cast<void*>(start), 0, count * sizeof(T)); }
};

// Softmax over `count` vectors, in each lane, in place
inline void softmax(vec* x, int64_t count) {
    vec high = x[0];
    for (int64_t k = 1; k < count; ++k) high = x[k] > high ? x[k] : high;
    vec sum = {};
    for (int64_t k = 0; k < count; ++k) sum += x[k] = exponential(x[k] - high);
    const vec inverse = SCALAR(1) / sum;
    for (int64_t k = 0; k < count; ++k) x[k] *= inverse;
}

}  // namespace
