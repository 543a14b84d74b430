/* The inner loop of checksum.py, which has the definition, and a copy that goes past the caches;
   compiled.py calls both. One pass over the bytes also says whether all of them are finite numbers.

   Plain C without Python.h. The caller has checked every argument. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

/* part_X: sums of n elements, plain, and weighted by 2i + 1; `top` becomes the largest `exponent` part
   of any. It does not multiply: each lane adds up its own running sum, in which an element that came
   at step t of T is T - t times.

   runs_X: the checksum of `num_runs` runs of `length` elements. Run r begins `stride` elements after
   run r - 1 in memory, and at element starts[r] of the whole tensor. */
#define SUM_OF(NAME, ELEMENT)                                                                    \
    WIDEST static void part_##NAME(const ELEMENT *at, size_t n, ELEMENT exponent,                \
                                   uint64_t *plain, uint64_t *weighted, ELEMENT *top) {          \
        uint64_t sum[LANES] = {0}, running[LANES] = {0}, p = 0, w = 0;                           \
        ELEMENT most[LANES] = {0}, all = *top;                                                   \
        size_t steps = n / LANES;                                                                \
        for (size_t t = 0; t < steps; t++)                                                       \
            for (size_t lane = 0; lane < LANES; lane++) {                                        \
                ELEMENT bits = at[t * LANES + lane], part = bits & exponent;                     \
                sum[lane] += bits;                                                               \
                running[lane] += sum[lane];                                                      \
                most[lane] = part > most[lane] ? part : most[lane];                              \
            }                                                                                    \
        for (size_t lane = 0; lane < LANES; lane++) {                                            \
            uint64_t by_step = steps * sum[lane] - running[lane];                                \
            p += sum[lane];                                                                      \
            w += 2 * LANES * by_step + (2 * lane + 1) * sum[lane];                               \
            all = most[lane] > all ? most[lane] : all;                                           \
        }                                                                                        \
        for (size_t i = steps * LANES; i < n; i++) {                                             \
            ELEMENT part = at[i] & exponent;                                                     \
            p += at[i];                                                                          \
            w += (2 * (uint64_t)i + 1) * at[i];                                                  \
            all = part > all ? part : all;                                                       \
        }                                                                                        \
        *plain = p;                                                                              \
        *weighted = w;                                                                           \
        *top = all;                                                                              \
    }                                                                                            \
                                                                                                 \
    static uint64_t runs_##NAME(const struct box *box, uint8_t *not_finite) {                    \
        const ELEMENT *data = box->data;                                                         \
        ELEMENT exponent = (ELEMENT)box->exponent, top = 0;                                      \
        uint64_t total = 0;                                                                      \
        for (size_t run = 0; run < box->num_runs; run++) {                                       \
            const ELEMENT *at = data + (ptrdiff_t)run * box->stride;                             \
            uint64_t index = box->starts[run];                                                   \
            for (size_t left = box->length; left;) {                                             \
                uint64_t offset = index % CHUNK, plain, weighted;                                \
                size_t n = CHUNK - (size_t)offset < left ? CHUNK - (size_t)offset : left;        \
                part_##NAME(at, n, exponent, &plain, &weighted, &top);                           \
                total += (weighted + 2 * offset * plain) * mix64(box->identity, index / CHUNK);  \
                at += n;                                                                         \
                index += n;                                                                      \
                left -= n;                                                                       \
            }                                                                                    \
        }                                                                                        \
        *not_finite = exponent && top == exponent;                                               \
        return total;                                                                            \
    }

/* A row of the table that compiled.py makes, all of 8 bytes. `exponent` has the bits that are all set
   in an element that is no finite number; 0 where nobody asks. */
struct box {
    const void *data;
    uint64_t num_runs, length;
    int64_t stride;
    const uint64_t *starts;
    uint64_t identity, itemsize, exponent;
};

SUM_OF(u8, uint8_t)
SUM_OF(u16, uint16_t)
SUM_OF(u32, uint32_t)

/* The checksum of each of n boxes, and whether it has an element that is not finite. */
void megarl_sum_boxes(const struct box *boxes, size_t n, uint64_t *sums, uint8_t *not_finite) {
    for (size_t i = 0; i < n; i++)
        sums[i] = boxes[i].itemsize == 1   ? runs_u8(&boxes[i], &not_finite[i])
                  : boxes[i].itemsize == 2 ? runs_u16(&boxes[i], &not_finite[i])
                                           : runs_u32(&boxes[i], &not_finite[i]);
}

/* Copy n bytes, for more than the caches hold: what is written is not read first, as a plain store to
   memory would have it, and pushes nothing out. */
void megarl_copy(char *to, const char *from, size_t n) {
#ifdef __SSE2__
    size_t head = (size_t)(-(uintptr_t)to & 15);
    if (n >= 64 + head) {
        memcpy(to, from, head);
        to += head, from += head, n -= head;
        for (; n >= 64; to += 64, from += 64, n -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)from);
            __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)(to + 16), b);
            _mm_stream_si128((__m128i *)(to + 32), c);
            _mm_stream_si128((__m128i *)(to + 48), d);
        }
        _mm_sfence();
    }
#endif
    memcpy(to, from, n);
}
