/* Megatron's .idx files: the lengths and places of sequences in a .bin. All little endian: 9 bytes
 * of magic, u64 version 1, u8 code of the tokens' dtype, u64 sequences, u64 documents + 1; then an
 * i32 length and an i64 byte offset for each sequence, and documents + 1 numbers of sequences. */
#include <string.h>

#include "runtime/data/index.h"

enum { HEADER = 34, LENGTH = 4, POINTER = 8, CODES = 9 };
static const int widths[CODES] = {0, 1, 0, 0, 4, 8, 0, 0, 2}; /* by dtype code; 0: no tokens */
static const char magic[9] = "MMIDIDX\0";

static int64_t number(const unsigned char *bytes, int count) {
    uint64_t value = 0;
    for (int i = 0; i < count; i++) value |= (uint64_t)bytes[i] << 8 * i;
    return (int64_t)value;
}

static ml_status read_number(const store *s, int64_t offset, int bytes, int64_t *value) {
    unsigned char raw[8] = {0};
    ML_TRY(ml_file_read(&s->index, offset, raw, bytes));
    *value = number(raw, bytes);
    return ML_OK;
}

static ml_status wrong(const store *s, int64_t offset, const char *what) {
    ml_fail(ML_IO, "%s is damaged at byte %lld: %s", s->index.path, (long long)offset, what);
    return ml_help("write it anew: mlua tokenize, or Megatron's preprocess_data.py");
}

static ml_status read_header(store *s) {
    unsigned char h[HEADER];
    if (s->index.bytes < HEADER) return wrong(s, s->index.bytes, "it ends within its header");
    ML_TRY(ml_file_read(&s->index, 0, h, HEADER));
    if (memcmp(h, magic, sizeof magic) != 0)
        return wrong(s, 0, "it does not begin with MMIDIDX, as Megatron's index files do");
    if (number(h + 9, 8) != 1) return wrong(s, 9, "its version is not 1");
    s->width = h[17] < CODES ? widths[h[17]] : 0;
    if (!s->width) return wrong(s, 17, "the dtype is none of u8, u16, i32 and i64");
    s->sequences = number(h + 18, 8), s->documents = number(h + 26, 8);
    int64_t most = s->index.bytes / (LENGTH + POINTER);
    if (s->sequences < 1 || s->sequences > most) return wrong(s, 18, "the number of sequences");
    if (s->documents < 1 || s->documents > most) return wrong(s, 26, "the number of documents");
    s->documents--; /* without the end of the last one */
    s->lengths = HEADER, s->pointers = HEADER + s->sequences * LENGTH;
    int64_t size = s->pointers + s->sequences * POINTER + (s->documents + 1) * POINTER;
    if (size != s->index.bytes)
        return wrong(s, s->index.bytes < size ? s->index.bytes : size,
                     "its size is not that of its sequences and documents");
    return ML_OK;
}

/* The bytes [*first, *end) of sequence i in the .bin. */
static ml_status read_sequence(const store *s, int64_t i, int64_t *first, int64_t *end) {
    int64_t length = 0, at = s->pointers + i * POINTER;
    ML_TRY(read_number(s, at, POINTER, first));
    ML_TRY(read_number(s, s->lengths + i * LENGTH, LENGTH, &length));
    if (length > INT32_MAX) return wrong(s, s->lengths + i * LENGTH, "a negative length");
    if (*first < 0 || *first % s->width || *first > s->file.bytes - length * s->width)
        return wrong(s, at, "a sequence lies outside the .bin file");
    *end = *first + length * s->width;
    return ML_OK;
}

/* Sequences lie one after another: looked at here and there. */
static ml_status check_sequences(const store *s) {
    enum { PLACES = 64 };
    int64_t first = 0, end = 0, next = 0, after = 0;
    for (int64_t p = 0; p < PLACES; p++) {
        int64_t i = (int64_t)((__int128)(s->sequences - 1) * p / (PLACES - 1));
        ML_TRY(read_sequence(s, i, &first, &end));
        if (i == 0 && first != 0) return wrong(s, s->pointers, "the first sequence is not at 0");
        if (i == s->sequences - 1) {
            if (end != s->file.bytes)
                return wrong(s, s->pointers + i * POINTER,
                             "the last sequence does not end with the .bin");
            continue;
        }
        ML_TRY(read_sequence(s, i + 1, &next, &after));
        if (next != end)
            return wrong(s, s->pointers + (i + 1) * POINTER,
                         "a sequence does not begin where the one before it ends");
    }
    return ML_OK;
}

ml_status index_open(const char *path, store *s) {
    ML_TRY(ml_file_open(path, &s->index));
    ML_TRY(read_header(s));
    if (s->file.bytes % s->width)
        return ml_fail(ML_IO, "%s has %lld bytes, which are no tokens of %d bytes as %s says",
                       s->file.path, (long long)s->file.bytes, s->width, path);
    s->tokens = s->file.bytes / s->width;
    return check_sequences(s);
}

/* Whether sequence i is the first one of a document. Documents of several sequences, as sentences,
 * are rare: most files have one each, or name none. */
static ml_status begins_document(const store *s, int64_t i, bool *begins) {
    int64_t low = 0, high = s->documents, numbers = s->pointers + s->sequences * POINTER, value = i;
    *begins = true;
    if (s->documents == 0 || s->documents == s->sequences) return ML_OK;
    while (low < high) { /* the first one that is at least i */
        int64_t middle = low + (high - low) / 2;
        ML_TRY(read_number(s, numbers + middle * POINTER, POINTER, &value));
        if (value < i)
            low = middle + 1;
        else
            high = middle;
    }
    ML_TRY(read_number(s, numbers + low * POINTER, POINTER, &value));
    *begins = value == i;
    return ML_OK;
}

ml_status index_mark(const store *s, int64_t at, int64_t count, unsigned char *begins) {
    int64_t low = 0, high = s->sequences - 1, byte = at * s->width, first, end, before;
    bool document = false;
    while (low < high) { /* the last one that begins at the byte or before it */
        int64_t middle = low + (high - low + 1) / 2, begin;
        ML_TRY(read_number(s, s->pointers + middle * POINTER, POINTER, &begin));
        if (begin <= byte)
            low = middle;
        else
            high = middle - 1;
    }
    ML_TRY(read_sequence(s, low, &first, &end));
    if (byte < first || byte >= end)
        return wrong(s, s->pointers + low * POINTER, "sequences are not in order");
    if (byte == first) {
        ML_TRY(begins_document(s, low, &document));
        begins[0] = document;
    }
    while (++low < s->sequences && end / s->width < at + count) {
        before = end;
        ML_TRY(read_sequence(s, low, &first, &end));
        if (first != before)
            return wrong(s, s->pointers + low * POINTER,
                         "a sequence does not follow the one before it");
        ML_TRY(begins_document(s, low, &document));
        begins[first / s->width - at] |= document; /* of an empty one and the next */
    }
    return ML_OK;
}
