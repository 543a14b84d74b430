/* The inner loop of checksum.py, which has the definition; compiled.py calls it.

   Plain C without Python.h. The caller has checked every argument. */

#include <stddef.h>
#include <stdint.h>

#define CHUNK 32768
#define LANES 32 /* independent sums, for the compiler to keep in vector registers */

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

static uint64_t mix64(uint64_t identity, uint64_t chunk) {
    uint64_t z = chunk * 0x9E3779B97F4A7C15u + identity;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) | 1u;
}

/* part_X: sums of n elements, plain, and weighted by 2i + 1. It does not multiply: each lane adds up
   its own running sum, in which an element that came at step t of T is T - t times.

   megarl_sum_X: the checksum of `num_runs` runs of `length` elements. Run r begins `stride` elements
   after run r - 1 in memory, and at element starts[r] of the whole tensor. */
#define SUM_OF(NAME, ELEMENT)                                                                    \
    WIDEST static void part_##NAME(const ELEMENT *at, size_t n, uint64_t *plain,                 \
                                   uint64_t *weighted) {                                         \
        uint64_t sum[LANES] = {0}, running[LANES] = {0}, p = 0, w = 0;                           \
        size_t steps = n / LANES;                                                                \
        for (size_t t = 0; t < steps; t++)                                                       \
            for (size_t lane = 0; lane < LANES; lane++) {                                        \
                sum[lane] += at[t * LANES + lane];                                               \
                running[lane] += sum[lane];                                                      \
            }                                                                                    \
        for (size_t lane = 0; lane < LANES; lane++) {                                            \
            uint64_t by_step = steps * sum[lane] - running[lane];                                \
            p += sum[lane];                                                                      \
            w += 2 * LANES * by_step + (2 * lane + 1) * sum[lane];                               \
        }                                                                                        \
        for (size_t i = steps * LANES; i < n; i++) {                                             \
            p += at[i];                                                                          \
            w += (2 * (uint64_t)i + 1) * at[i];                                                  \
        }                                                                                        \
        *plain = p;                                                                              \
        *weighted = w;                                                                           \
    }                                                                                            \
                                                                                                 \
    uint64_t megarl_sum_##NAME(const ELEMENT *data, size_t num_runs, size_t length,              \
                               ptrdiff_t stride, const uint64_t *starts, uint64_t identity) {    \
        uint64_t total = 0;                                                                      \
        for (size_t run = 0; run < num_runs; run++) {                                            \
            const ELEMENT *at = data + (ptrdiff_t)run * stride;                                  \
            uint64_t index = starts[run];                                                        \
            for (size_t left = length; left;) {                                                  \
                uint64_t offset = index % CHUNK, plain, weighted;                                \
                size_t n = CHUNK - (size_t)offset < left ? CHUNK - (size_t)offset : left;        \
                part_##NAME(at, n, &plain, &weighted);                                           \
                total += (weighted + 2 * offset * plain) * mix64(identity, index / CHUNK);       \
                at += n;                                                                         \
                index += n;                                                                      \
                left -= n;                                                                       \
            }                                                                                    \
        }                                                                                        \
        return total;                                                                            \
    }

SUM_OF(u8, uint8_t)
SUM_OF(u16, uint16_t)
SUM_OF(u32, uint32_t)
