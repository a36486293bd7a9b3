/* Where pieces begin in blocks of 64 bytes of ASCII: a bit for each byte and class, and the
 * pattern as arithmetic on these masks. A block begins where a piece does. */
#include <stdbool.h>
#include <string.h>

#include "runtime/text/scan_block.h"

typedef unsigned char bytes16 __attribute__((vector_size(16)));
typedef uint64_t words2 __attribute__((vector_size(16)));

enum { AHEAD = 4 }; /* bytes behind a beginning that decide on it: those of a contraction */

/* A bit of byte i at bit i of each. */
typedef struct {
    uint64_t letter, upper, digit, space, blank, line_break, quote, slash, high;
} masks;

/* The high bits of 16 bytes. */
static inline uint64_t high_bits(bytes16 of) {
#ifdef __SSE2__
    typedef char signed16 __attribute__((vector_size(16)));
    return (uint64_t)__builtin_ia32_pmovmskb128((signed16)of);
#else
    words2 words = (words2)of >> 7 & 0x0101010101010101;
    words *= 0x0102040810204080;
    return words[0] >> 56 | words[1] >> 56 << 8;
#endif
}

static inline masks classify(const unsigned char *at, bool o200k) {
    masks m = {0};
    for (int i = 0; i < SCAN_BLOCK; i += 16) {
        bytes16 x;
        memcpy(&x, at + i, 16);
        bytes16 blank = (bytes16)(x == ' '), line = (bytes16)(x == '\n') | (bytes16)(x == '\r');
        bytes16 letter = (bytes16)((x | 0x20) - 'a' < 26);
        bytes16 space = blank | (bytes16)(x - '\t' < 5), digit = (bytes16)(x - '0' < 10);
        m.letter |= high_bits(letter) << i;
        m.digit |= high_bits(digit) << i;
        m.space |= high_bits(space) << i;
        m.blank |= high_bits(blank) << i;
        m.line_break |= high_bits(line) << i;
        m.quote |= high_bits((bytes16)(x == '\'')) << i;
        if (o200k) m.upper |= high_bits((bytes16)(x - 'A' < 26)) << i;
        if (o200k) m.slash |= high_bits((bytes16)(x == '/')) << i;
        m.high |= high_bits(x) << i;
    }
    return m;
}

/* Bits of a mask of which the bit before is not set. */
static inline uint64_t firsts(uint64_t of) {
    return of & ~(of << 1);
}

/* Of runs in `of` those bits that lie before a bit of `last` in the same run, and that bit. */
static inline uint64_t before_in_run(uint64_t last, uint64_t of) {
    for (int step = 1; step < SCAN_BLOCK; step *= 2) {
        last |= of & last >> step;
        of &= of >> step;
    }
    return last;
}

/* Bytes of 's, 't, 'm, 'd, 're, 've, 'll; 0: none of them. */
static inline int contraction(const unsigned char *at, bool any_case) {
    unsigned fold = any_case ? 0x20 : 0, a = at[1] | fold, b = at[2] | fold;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

static inline uint64_t bit(int n) {
    return (uint64_t)1 << n;
}

/* A piece that begins with a contraction ends behind it. */
static inline uint64_t with_contractions(uint64_t begins, const masks *m, const unsigned char *at,
                                         int limit, bool any_case) {
    for (uint64_t left = m->quote & (begins | 1); left; left &= left - 1) {
        int i = __builtin_ctzll(left), n = i <= limit ? contraction(at + i, any_case) : 0;
        if (n) begins = (begins & ~bit(i + 1) & ~bit(i + n - 1)) | bit(i) | bit(i + n);
    }
    return begins;
}

/* The same for o200k, where one belongs to the word before it. */
static inline uint64_t with_suffixes(uint64_t begins, const masks *m, const unsigned char *at,
                                     int limit) {
    int done = 0;
    for (uint64_t left = m->quote & m->letter << 1; left; left &= left - 1) {
        int i = __builtin_ctzll(left), n = i <= limit && i != done ? contraction(at + i, true) : 0;
        if (!n) continue;
        begins = (begins & ~bit(i) & ~bit(i + 1) & ~bit(i + n - 1)) | bit(i + n);
        done = i + n;
    }
    return begins;
}

static inline uint64_t begin_gpt2(const masks *m) {
    uint64_t others = ~(m->letter | m->digit | m->space | m->high);
    uint64_t words = firsts(m->letter) | firsts(m->digit) | firsts(others);
    uint64_t last = m->space & ~(m->space >> 1); /* belongs to what follows, or is a piece */
    return firsts(m->space) | last | (words & ~(m->blank << 1));
}

static inline uint64_t begin_digits(uint64_t digit, int most) {
    uint64_t begins = firsts(digit), next = begins, whole = digit & digit << 1;
    if (most == 1) return digit;
    if (most == 3) whole &= digit << 2 & digit << 3;
    if (most == 2) whole &= digit << 2;
    while ((next = next << most & whole)) begins |= next;
    return begins;
}

/* `attached`: line breaks that belong to the signs before them. */
static inline uint64_t begin_cl100k(const masks *m, int digits, uint64_t *attached) {
    uint64_t others = ~(m->letter | m->digit | m->space | m->high);
    uint64_t breaks = m->line_break, seeds = breaks & others << 1;
    *attached = ((breaks + seeds) ^ breaks) & breaks;
    uint64_t space = m->space & ~*attached, plain = space & ~breaks;
    uint64_t last = plain & ~(m->space >> 1);
    uint64_t tail = before_in_run(last, plain); /* behind the last line break of a run */
    uint64_t alone = others & ~(others << 1) & ~(others >> 1) & ~(m->blank << 1);
    uint64_t words = firsts(m->letter) & ~(plain << 1) & ~(alone << 1);
    uint64_t signs = firsts(others) & ~(m->blank << 1);
    return firsts(space) | firsts(tail) | last | words | signs | begin_digits(m->digit, digits);
}

static inline int ascii(const masks *m) {
    return m->high ? __builtin_ctzll(m->high) : SCAN_BLOCK;
}

/* The last place of which is known whether a piece begins there; of a run of spaces up to the
 * block's end only where it begins. */
static inline int decided(const masks *m) {
    const int count = ascii(m);
    if (count < AHEAD) return 0;
    uint64_t other = ~m->space << (SCAN_BLOCK - count);
    int spaces = other ? __builtin_clzll(other) : count;
    return count - (spaces < AHEAD ? AHEAD : spaces);
}

static inline uint64_t up_to(uint64_t begins, int last) {
    return last < 1 ? 0 : begins & ~bit(0) & (bit(last) * 2 - 1);
}

uint64_t scan_block_gpt2(const unsigned char *at) {
    masks m = classify(at, false);
    int last = ascii(&m) - AHEAD;
    return up_to(with_contractions(begin_gpt2(&m), &m, at, last, false), last);
}

uint64_t scan_block_cl100k(const unsigned char *at, int digits) {
    uint64_t attached;
    masks m = classify(at, false);
    uint64_t begins = begin_cl100k(&m, digits, &attached);
    return up_to(with_contractions(begins, &m, at, ascii(&m) - AHEAD, true), decided(&m));
}

uint64_t scan_block_o200k(const unsigned char *at) {
    uint64_t attached;
    masks m = classify(at, true);
    uint64_t begins = begin_cl100k(&m, 3, &attached) | (m.upper & (m.letter & ~m.upper) << 1);
    uint64_t slash = m.slash & attached << 1; /* belongs to the signs too */
    int last = decided(&m), slashed = slash ? __builtin_ctzll(slash) - 1 : last;
    begins = with_suffixes(begins, &m, at, ascii(&m) - AHEAD);
    return up_to(begins, slashed < last ? slashed : last);
}
