/* Pre-tokenizers: a text to the pieces that are encoded each alone. */
#define _GNU_SOURCE /* memmem */
#include <string.h>

#include "runtime/text/encoder.h"
#include "runtime/text/unicode.h"

typedef const unsigned char *place;

/* The pieces of step `step - 1` are given to step `step`. */
typedef struct {
    ml_encoder *encoder;
    uint32_t step;
} next_step;

static void run(next_step next, const char *text, size_t bytes);

static void take(void *context, const char *piece, size_t bytes) {
    run(*(const next_step *)context, piece, bytes);
}

static bool add_part(ml_encoder *e, uint32_t step, size_t begin, size_t end, bool match) {
    if (begin == end) return true;
    if (e->parts[step].count == e->parts[step].room) {
        size_t room = e->parts[step].room ? 2 * e->parts[step].room : 64;
        split_part *more =
            ml_realloc(e->parts[step].at, e->parts[step].room * sizeof *more, room * sizeof *more);
        if (!more) {
            e->status = ml_fail(ML_NO_MEMORY, "not enough host memory for %zu pieces", room);
            return false;
        }
        e->parts[step].at = more;
        e->parts[step].room = room;
    }
    e->parts[step].at[e->parts[step].count++] = (split_part){begin, end, match};
    return true;
}

static bool is_of(text_split_kind kind, uint32_t c) {
    unsigned class = unicode_class(c);
    if (kind == SPLIT_NUMBERS) return class & TEXT_NUMBER;
    if (kind == SPLIT_SPACES) return class & TEXT_SPACE;
    return class & TEXT_PUNCT || (c < 0x80 && class & TEXT_SYMBOL);
}

/* Matches and what lies between them, in order. */
static bool find_parts(ml_encoder *e, const text_split *split, uint32_t step, const char *text,
                       size_t bytes) {
    size_t gap = 0, at = 0, begin, end;
    place first = (place)text;
    while (at < bytes) {
        int found = 1, length = 0;
        begin = at;
        if (split->kind != SPLIT_PATTERN && split->kind != SPLIT_METASPACE) {
            found = is_of(split->kind, unicode_read(first + at, first + bytes, &length));
            end = at + (size_t)length;
            if (!found) {
                at = end;
                continue;
            }
        } else if (split->pattern.code) {
            found = regex_find(e->matcher, split->pattern.code, text, bytes, at, &begin, &end);
            if (found < 0) e->status = ml_error_last()->status;
        } else {
            text_string what = split->pattern.text;
            const char *where = memmem(text + at, bytes - at, what.at, what.bytes);
            if (!where) break;
            begin = (size_t)(where - text);
            end = begin + what.bytes;
        }
        if (found <= 0) break;
        if (end == begin) { /* an empty match parts the text as well */
            if (!add_part(e, step, gap, begin, false)) return false;
            gap = begin;
            if (begin < bytes) unicode_read(first + begin, first + bytes, &length);
            at = begin + (size_t)(length ? length : 1);
            continue;
        }
        if (!add_part(e, step, gap, begin, split->invert) ||
            !add_part(e, step, begin, end, !split->invert))
            return false;
        gap = at = end;
    }
    return e->status == ML_OK && add_part(e, step, gap, bytes, split->invert);
}

/* Join parts as the behavior says, and give them on. */
static void give_parts(ml_encoder *e, text_behavior behavior, uint32_t step, const char *text,
                       const next_step *next) {
    const split_part *part = e->parts[step].at;
    size_t count = e->parts[step].count;
    for (size_t i = 0, last; i < count && e->status == ML_OK; i = last + 1) {
        last = i;
        if (behavior == PIECE_REMOVED && part[i].match) continue;
        if (behavior == PIECE_CONTIGUOUS)
            while (last + 1 < count && part[last + 1].match == part[i].match) last++;
        if (behavior == PIECE_WITH_PREVIOUS && !part[i].match && i + 1 < count && part[i + 1].match)
            last++;
        if (behavior == PIECE_WITH_NEXT && part[i].match && i + 1 < count && !part[i + 1].match)
            last++;
        run(*next, text + part[i].begin, part[last].end - part[i].begin);
    }
}

static bool starts_with(const char *text, size_t bytes, text_string prefix) {
    return bytes >= prefix.bytes && memcmp(text, prefix.at, prefix.bytes) == 0;
}

/* ByteLevel: a space before the text, the expression, bytes as characters. */
static ml_status byte_level(ml_encoder *e, const text_split *split, uint32_t step,
                            const char **text, size_t *bytes) {
    ml_bytes *to = &e->step[step];
    bool mapped = e->tokenizer->mapped, prefix = split->prefix && **text != ' ';
    if (!mapped && !prefix) return ML_OK;
    to->count = 0;
    if (prefix) ML_TRY(ml_bytes_add(to, " ", 1));
    ML_TRY(ml_bytes_add(to, *text, *bytes));
    *text = to->at;
    *bytes = to->count;
    return ML_OK;
}

typedef struct {
    next_step next;
    ml_bytes *to;
} mapping;

static void map_piece(void *context, const char *piece, size_t bytes) {
    mapping *m = context;
    ml_encoder *e = m->next.encoder;
    m->to->count = 0;
    for (size_t i = 0; i < bytes && e->status == ML_OK; i++) {
        char text[4];
        int length = text_byte_character((unsigned char)piece[i], text);
        e->status = ml_bytes_add(m->to, text, (size_t)length);
    }
    if (e->status == ML_OK) run(m->next, m->to->at, m->to->count);
}

static ml_status metaspace(ml_encoder *e, const text_split *split, uint32_t step, const char **text,
                           size_t *bytes) {
    ml_bytes *to = &e->step[step];
    to->count = 0;
    bool prefix = split->prefix == PREFIX_ALWAYS || (split->prefix == PREFIX_FIRST && e->first);
    if (prefix && **text != ' ' && !starts_with(*text, *bytes, split->to))
        ML_TRY(ml_bytes_add(to, split->to.at, split->to.bytes));
    for (size_t i = 0, gap = 0; i <= *bytes; i++)
        if (i == *bytes || (*text)[i] == ' ') {
            ML_TRY(ml_bytes_add(to, *text + gap, i - gap));
            if (i < *bytes) ML_TRY(ml_bytes_add(to, split->to.at, split->to.bytes));
            gap = i + 1;
        }
    *text = to->at;
    *bytes = to->count;
    return ML_OK;
}

/* Back to the bytes that the model takes. */
static ml_status unmap(ml_encoder *e, const char **text, size_t *bytes) {
    ml_bytes *to = &e->step[STEP_UNMAPPED];
    place at = (place)*text, end = at + *bytes;
    to->count = 0;
    ML_TRY(ml_bytes_reserve(to, *bytes));
    for (int length; at < end; at += length)
        to->at[to->count++] = (char)text_character_byte(unicode_read(at, end, &length));
    *text = to->at;
    *bytes = to->count;
    return ML_OK;
}

/* Give pieces of a scan on: at the last step many at once. */
static void scan(const next_step *next, scan_kind kind, const char *text, size_t bytes) {
    ml_encoder *e = next->encoder;
    mapping map = {*next, &e->step[STEP_MAPPED]};
    if (next->step == e->tokenizer->splits.count && !e->tokenizer->mapped)
        piece_scan(e, kind, text, bytes);
    else if (e->tokenizer->splits.at[next->step - 1].kind == SPLIT_BYTES && e->tokenizer->mapped)
        scan_text(kind, text, bytes, map_piece, &map);
    else
        scan_text(kind, text, bytes, take, (void *)next);
}

static void run(next_step next, const char *text, size_t bytes) {
    ml_encoder *e = next.encoder;
    uint32_t step = next.step;
    if (e->status != ML_OK || !bytes) return;
    if (step == e->tokenizer->splits.count) {
        if (e->tokenizer->mapped) e->status = unmap(e, &text, &bytes);
        if (e->status == ML_OK) piece_encode(e, text, bytes);
        return;
    }
    const text_split *split = &e->tokenizer->splits.at[step];
    next.step++;
    switch (split->kind) {
    case SPLIT_SCAN: scan(&next, split->scan, text, bytes); return;
    case SPLIT_BYTES:
        e->status = byte_level(e, split, step, &text, &bytes);
        if (e->status == ML_OK) scan(&next, split->scan, text, bytes);
        return;
    case SPLIT_METASPACE:
        e->status = metaspace(e, split, step, &text, &bytes);
        if (e->status != ML_OK) return;
        if (!split->pieces) {
            run(next, text, bytes);
            return;
        }
        break;
    case SPLIT_PATTERN:
    case SPLIT_NUMBERS:
    case SPLIT_PUNCTUATION:
    case SPLIT_SPACES: break;
    }
    e->parts[step].count = 0;
    if (find_parts(e, split, step, text, bytes)) give_parts(e, split->behavior, step, text, &next);
}

void split_text(ml_encoder *e, const char *text, size_t bytes) {
    run((next_step){e, 0}, text, bytes);
}
