/* Decoding: all at once, or token by token with whole characters at each step. */
#include <string.h>

#include "runtime/text/model.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/unicode.h"

typedef const unsigned char *place;

struct ml_decoder {
    const ml_tokenizer *tokenizer;
    int flags;
    bool begun;    /* a token was given */
    int64_t strip; /* how many times the text's beginning may still be stripped */
    ml_bytes kept; /* bytes whose character is not whole, or of a run of byte tokens */
    bool run;      /* kept is such a run */
};

ml_status ml_decoder_open(const ml_tokenizer *t, int flags, ml_decoder **decoder) {
    *decoder = ml_alloc(sizeof **decoder);
    if (!*decoder) return ml_fail(ML_NO_MEMORY, "not enough host memory for a decoder");
    **decoder = (ml_decoder){.tokenizer = t, .flags = flags, .strip = t->decoding.strip_count};
    return ML_OK;
}

void ml_decoder_close(ml_decoder *d) {
    if (!d) return;
    ml_bytes_free(&d->kept);
    ml_free(d);
}

/* Without what is stripped at the text's beginning. */
static ml_status emit(ml_decoder *d, const char *at, size_t bytes, ml_bytes *text) {
    text_string strip = d->tokenizer->decoding.strip;
    while (d->strip > 0 && bytes >= strip.bytes && strip.bytes &&
           memcmp(at, strip.at, strip.bytes) == 0) {
        at += strip.bytes;
        bytes -= strip.bytes;
        d->strip--;
    }
    if (bytes) d->strip = 0;
    return ml_bytes_add(text, at, bytes);
}

/* A run of byte tokens is text where it is UTF-8, else as many U+FFFD as it has bytes. */
static ml_status end_run(ml_decoder *d, ml_bytes *text) {
    place at = (place)d->kept.at, end = at + d->kept.count;
    bool valid = true;
    for (int length; at < end && valid; at += length)
        valid = unicode_read(at, end, &length) < TEXT_NO_CHARACTER;
    for (size_t i = 0; i < d->kept.count && !valid; i++) ML_TRY(emit(d, "\xEF\xBF\xBD", 3, text));
    if (valid) ML_TRY(emit(d, d->kept.at, d->kept.count, text));
    d->kept.count = 0;
    d->run = false;
    return ML_OK;
}

/* Of bytes, whole characters; what can still become one is kept. */
static ml_status whole_characters(ml_decoder *d, bool last, ml_bytes *text) {
    place at = (place)d->kept.at, end = at + d->kept.count;
    int length;
    for (; at < end; at += length) {
        if (unicode_read(at, end, &length) < TEXT_NO_CHARACTER) {
            ML_TRY(emit(d, (const char *)at, (size_t)length, text));
            continue;
        }
        length = unicode_broken(at, end);
        if (!last && at + length == end && unicode_begins(at, end)) break;
        ML_TRY(emit(d, "\xEF\xBF\xBD", 3, text));
    }
    d->kept.count = (size_t)(end - at);
    if (d->kept.count) memmove(d->kept.at, at, d->kept.count);
    return ML_OK;
}

/* Add a token's bytes to d->kept, or give them; `raw`: bytes that are no UTF-8 are given too. */
static ml_status add(ml_decoder *d, uint32_t id, bool raw, ml_bytes *text) {
    const ml_tokenizer *t = d->tokenizer;
    size_t bytes;
    if (!ml_tokenizer_token(t, id, &bytes))
        return ml_fail(ML_INVALID, "id %u is not a token of %s, which has %lld", id, t->name,
                       (long long)t->vocab);
    const text_token *token = &t->tokens[id];
    if (d->flags & ML_DECODE_SKIP_SPECIAL && token->flags & TOKEN_SPECIAL) return ML_OK;
    text_string what = token->raw;
    if (t->decoding.fallback) {
        if (token->flags & TOKEN_BYTE) {
            d->run = d->begun = true;
            return ml_bytes_add(&d->kept, what.at, what.bytes);
        }
        if (d->run) ML_TRY(end_run(d, text));
    }
    if (d->begun && t->decoding.spaced) ML_TRY(ml_bytes_add(text, " ", 1));
    if (!d->begun && t->decoding.no_leading) {
        d->begun = true;
        for (size_t i = 0; i < token->text.bytes;) {
            text_string space = t->decoding.space, rest = {token->text.at + i, space.bytes};
            bool is_space =
                i + space.bytes <= token->text.bytes && memcmp(rest.at, space.at, space.bytes) == 0;
            if (!is_space) ML_TRY(ml_bytes_add(text, rest.at, 1));
            i += is_space ? space.bytes : 1;
        }
        return ML_OK;
    }
    d->begun = true;
    if (raw || (!t->byte_level && t->kind != MODEL_BYTES))
        return emit(d, what.at, what.bytes, text);
    ML_TRY(ml_bytes_add(&d->kept, what.at, what.bytes));
    return whole_characters(d, false, text);
}

ml_status ml_decoder_add(ml_decoder *d, uint32_t id, ml_bytes *text) {
    return add(d, id, false, text);
}

ml_status ml_decoder_end(ml_decoder *d, ml_bytes *text) {
    return d->run ? end_run(d, text) : whole_characters(d, true, text);
}

ml_status ml_tokenizer_decode(const ml_tokenizer *t, const uint32_t *ids, int64_t count, int flags,
                              ml_bytes *text) {
    ml_decoder *d;
    ML_TRY(ml_decoder_open(t, flags, &d));
    ml_status status = ML_OK;
    for (int64_t i = 0; i < count && status == ML_OK; i++) status = add(d, ids[i], true, text);
    if (status == ML_OK) status = ml_decoder_end(d, text);
    ml_decoder_close(d);
    return status;
}
