/* Unicode: what kind of character a code point is, and reading UTF-8.
 *
 * The classes are those of Unicode 16.0, whatever engine a peer uses. The table is filled once;
 * unicode_init comes before any other call. */
#ifndef ML_TEXT_UNICODE_H
#define ML_TEXT_UNICODE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    TEXT_LETTER = 1,  /* L */
    TEXT_NUMBER = 2,  /* N */
    TEXT_SPACE = 4,   /* White_Space */
    TEXT_MARK = 8,    /* M */
    TEXT_UPPER = 16,  /* Lu Lt Lm Lo M */
    TEXT_LOWER = 32,  /* Ll Lm Lo M */
    TEXT_PUNCT = 64,  /* P */
    TEXT_SYMBOL = 128 /* S */
};
enum {
    TEXT_CLASSES = 0x32400,      /* beyond lie selectors, which are marks, and what has no class */
    TEXT_NO_CHARACTER = 0x110000 /* + the byte: bytes that are no UTF-8 */
};

extern unsigned char unicode_classes[TEXT_CLASSES];
void unicode_init(void);

static inline unsigned unicode_class(uint32_t c) {
    if (c < TEXT_CLASSES) return unicode_classes[c];
    return c - 0xE0100 < 0xF0 ? TEXT_MARK | TEXT_UPPER | TEXT_LOWER : 0;
}

/* The character at `at`, of which *length bytes are its UTF-8; bytes that are none count one by
 * one, as TEXT_NO_CHARACTER + byte. at < end. */
static inline uint32_t unicode_read(const unsigned char *at, const unsigned char *end,
                                    int *length) {
    uint32_t c = at[0];
    *length = 1;
    if (c < 0x80) return c;
    int64_t left = end - at;
#define FOLLOWS(i) ((at[i] & 0xC0) == 0x80)
    if (c >= 0xC2 && c < 0xE0 && left > 1 && FOLLOWS(1)) {
        *length = 2;
        return (c & 0x1F) << 6 | (at[1] & 0x3F);
    }
    if (c >= 0xE0 && c < 0xF0 && left > 2 && FOLLOWS(1) && FOLLOWS(2)) {
        uint32_t wide = (c & 0xF) << 12 | (uint32_t)(at[1] & 0x3F) << 6 | (at[2] & 0x3F);
        if (wide >= 0x800 && wide - 0xD800 >= 0x800) {
            *length = 3;
            return wide;
        }
    }
    if (c >= 0xF0 && c < 0xF5 && left > 3 && FOLLOWS(1) && FOLLOWS(2) && FOLLOWS(3)) {
        uint32_t wide = (c & 7) << 18 | (uint32_t)(at[1] & 0x3F) << 12 |
                        (uint32_t)(at[2] & 0x3F) << 6 | (at[3] & 0x3F);
        if (wide >= 0x10000 && wide < 0x110000) {
            *length = 4;
            return wide;
        }
    }
#undef FOLLOWS
    return TEXT_NO_CHARACTER + c;
}

/* Of bytes at `at` that are no UTF-8: how many stand for one U+FFFD (those that a character could
 * begin with, at least one), and whether more bytes after `end` could make them a character. */
int unicode_broken(const unsigned char *at, const unsigned char *end);
bool unicode_begins(const unsigned char *at, const unsigned char *end);

/* Bytes of a character's UTF-8, written to `to`. */
int unicode_write(uint32_t c, char to[4]);

#endif
