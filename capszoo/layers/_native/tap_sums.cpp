// Gradient of a strided convolution for its input, from the products of its taps: bfloat16 in and out, sums in float32.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int CHANNELS = 64;  // of a block, whose sums stay in registers

inline float widen(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// To the nearest bfloat16, ties to even
inline uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint16_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return value != value ? uint16_t(0x7fc0) : rounded;
}

struct Range {
    int64_t first, last;
};

// Taps whose outputs reach the input at place i of this phase
inline Range reaching(int64_t i, int64_t outputs, int64_t taps) {
    return {std::max<int64_t>(0, i - outputs + 1), std::min(taps, i + 1)};
}

template <int N>
inline void sum(const uint16_t* from, Range a, Range b, int64_t step_a, int64_t step_b, uint16_t* to) {
    float total[N] = {};
    for (int64_t u = a.first; u < a.last; ++u)
        for (int64_t v = b.first; v < b.last; ++v)
            for (int k = 0; k < N; ++k) total[k] += widen(from[u * step_a + v * step_b + k]);
    for (int k = 0; k < N; ++k) to[k] = narrow(total[k]);
}

}  // namespace

// Images first to last. One phase: the taps and the inputs at rows p, p + stride, .. and columns q, q + stride, ..
//   products [taps_a, taps_b, images, rows, columns, channels]
//   gradient [images, height, width, channels]; written at this phase's inputs
extern "C" void tap_sums(const uint16_t* products, int64_t first, int64_t last, int64_t images, int64_t rows,
                         int64_t columns, int64_t channels, int64_t taps_a, int64_t taps_b, int64_t p, int64_t q,
                         int64_t stride, int64_t height, int64_t width, uint16_t* gradient) {
    // from one tap to the next its output is one row or column earlier
    const int64_t tap = images * rows * columns * channels;
    const int64_t step_a = taps_b * tap - columns * channels, step_b = tap - channels;
    for (int64_t n = first; n < last; ++n)
        for (int64_t y = p; y < height; y += stride)
            for (int64_t x = q; x < width; x += stride) {
                const int64_t i = (y - p) / stride, j = (x - q) / stride;
                const Range a = reaching(i, rows, taps_a), b = reaching(j, columns, taps_b);
                const int64_t from = ((n * rows + i) * columns + j) * channels;
                uint16_t* to = gradient + ((n * height + y) * width + x) * channels;
                int64_t k = 0;
                for (; k + CHANNELS <= channels; k += CHANNELS)
                    sum<CHANNELS>(products + from + k, a, b, step_a, step_b, to + k);
                for (; k < channels; ++k) sum<1>(products + from + k, a, b, step_a, step_b, to + k);
            }
}
