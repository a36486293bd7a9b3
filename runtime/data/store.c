#include "runtime/data/store.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/data/index.h"

#define FORMATS                                                                                    \
    "data files are text, .jsonl, either with .gz or .zst, and tokens: .bin (nanoGPT's, llm.c's, " \
    "Megatron's) or .npy"

bool store_ends_in(const char *path, const char *suffix) {
    size_t length = strlen(path), end = strlen(suffix);
    return length >= end && strcmp(path + length - end, suffix) == 0;
}

/* ---- What is in a file ----------------------------------------------------------------------- */

/* What a sample of a file has, by its bytes and by its u16 tokens. */
typedef struct {
    int64_t bytes, controls;   /* control characters that text does without */
    int64_t pairs, small, low; /* pairs of tokens, second tokens below 4, first ones below 256 */
    int64_t zeros;             /* of every second pair, those of zeros alone: halves of i64 */
} content;

/* White space, backspace and escape occur in text. */
static void count_content(const unsigned char *bytes, int64_t count, content *sum) {
    for (int64_t i = 0; i < count; i++) {
        bool rare = bytes[i] < 32 && !(bytes[i] >= 8 && bytes[i] <= 13) && bytes[i] != 27;
        sum->controls += rare || bytes[i] == 127;
    }
    for (int64_t i = 0; i + 3 < count; i += 4) {
        sum->low += bytes[i + 1] == 0;
        sum->small += bytes[i + 2] < 4 && bytes[i + 3] == 0;
        sum->zeros += i % 8 && !(bytes[i] | bytes[i + 1] | bytes[i + 2] | bytes[i + 3]);
        sum->pairs++;
    }
    sum->bytes += count;
}

/* From blocks all over the file. */
static ml_status sample_content(const store *s, content *sum) {
    enum { BLOCKS = 16, BLOCK = 4096 };
    unsigned char block[BLOCK];
    int64_t bytes = s->file.bytes, step = bytes / BLOCKS / BLOCK * BLOCK;
    if (step < BLOCK) step = BLOCK;
    for (int64_t first = 0; first < bytes; first += step) {
        int64_t count = bytes - first < BLOCK ? bytes - first : BLOCK;
        ML_TRY(ml_file_read(&s->file, first, block, count));
        count_content(block, count, sum);
    }
    return ML_OK;
}

static ml_status refuse(const store *s, const char *found, const char *how) {
    ml_fail(ML_IO, "%s is not %s: it is %s", s->file.path,
            s->width == 1 ? "text" : "a file of tokens", found);
    return how ? ml_help(FORMATS "; %s", how) : ml_help(FORMATS);
}

/* More than one control character in a hundred is no text: text has a stray one, while tokens,
 * weights and compressed data have ten or more. */
static ml_status check_text(const store *s, const unsigned char *head) {
    bool little = head[0] == 0xff && head[1] == 0xfe, big = head[0] == 0xfe && head[1] == 0xff;
    if (little || big) return refuse(s, "UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > data.txt");
    content sum = {0};
    ML_TRY(sample_content(s, &sum));
    if (sum.controls * 100 <= sum.bytes) return ML_OK;
    ml_fail(ML_IO, "%s is not text: of %lld bytes looked at, %.0f %% are control characters",
            s->file.path, (long long)sum.bytes, 100 * (double)sum.controls / (double)sum.bytes);
    return ml_help(FORMATS "; m.corpus(file, {dtype = \"u8\"}) takes any bytes");
}

/* Every second u16 below 4, and others not below 256, are the halves of u32 tokens. */
static ml_status find_width(store *s) {
    enum { ENOUGH = 64 };
    content sum = {0};
    ML_TRY(sample_content(s, &sum));
    if (sum.pairs < ENOUGH || sum.small < sum.pairs || sum.low == sum.pairs) return ML_OK;
    s->width = 4;
    if (sum.zeros < sum.pairs / 2) return ML_OK;
    ml_fail(ML_IO, "%s is not a file of tokens of u16 or u32: every second u32 is 0, as in i64",
            s->file.path);
    return ml_help("in Python, numpy.fromfile(FILE, \"int64\").astype(\"uint32\").tofile("
                   "\"tokens.bin\"); m.corpus(file, {dtype = \"u32\"}) takes any tokens");
}

static uint32_t word(const unsigned char *b) {
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* llm.c: 256 i32 (magic, version, tokens), then the tokens: u16, or u32 by another magic. */
static ml_status read_llmc(store *s, const unsigned char *head) {
    enum { HEADER = 1024, U16 = 20240520, U32 = 20240801 };
    uint32_t magic = word(head), version = word(head + 4), tokens = word(head + 8);
    s->width = magic == U16 ? 2 : 4, s->begin = HEADER;
    s->separator = magic == U16 ? 50256 : 128000, s->separator_first = true;
    if (version != (magic == U16 ? 1 : 7))
        return ml_fail(ML_IO, "%s has version %u of llm.c's token files at byte 4: %d is read",
                       s->file.path, version, magic == U16 ? 1 : 7);
    if (s->file.bytes - HEADER != (int64_t)tokens * s->width)
        return ml_fail(
            ML_IO, "%s has %lld bytes: its header says %u tokens at byte 8, which are %lld",
            s->file.path, (long long)s->file.bytes, tokens, (long long)tokens * s->width + HEADER);
    return ML_OK;
}

/* One-dimensional arrays of integers, little endian. */
static ml_status read_npy(store *s) {
    enum { MOST = 1024 };
    char text[MOST + 1] = {0}, kind = 0;
    int width = 0;
    long long tokens = -1;
    int64_t count = s->file.bytes < MOST ? s->file.bytes : MOST;
    ML_TRY(ml_file_read(&s->file, 0, text, count));
    const unsigned char *head = (const unsigned char *)text;
    int64_t first = head[6] == 1 ? 10 : 12; /* of the header's text */
    int64_t length = count < 12 ? MOST : word(head + 8);
    if (first == 10) length &= 0xffff;
    if (length > count - first)
        return ml_fail(ML_IO, "%s ends within its header, before byte %lld", s->file.path,
                       (long long)(first + length));
    text[first + length] = 0;
    const char *descr = strstr(text + first, "'descr':"), *shape = strstr(text + first, "'shape':");
    bool known = descr && shape && sscanf(descr + 8, " '%*[<|]%c%d'", &kind, &width) == 2 &&
                 sscanf(shape + 8, " (%lld,", &tokens) == 1 && strchr("ui", kind) &&
                 (width == 1 || width == 2 || width == 4 || width == 8) &&
                 !(kind == 'i' && width < 4) && tokens >= 0;
    const char *comma = shape ? strchr(shape, ',') : NULL;
    if (!known || !comma || comma[1 + strspn(comma + 1, " ")] != ')')
        return refuse(s, "a NumPy array that is not one-dimensional of u1, u2, u4, i4, u8 or i8",
                      "numpy.save(FILE, tokens.reshape(-1).astype(\"uint16\"))");
    s->width = width, s->begin = first + length;
    if (tokens > INT64_MAX / width || s->file.bytes - s->begin != tokens * width)
        return ml_fail(ML_IO,
                       "%s has %lld bytes after its header, which says %lld tokens of %d bytes",
                       s->file.path, (long long)(s->file.bytes - s->begin), tokens, width);
    return ML_OK;
}

/* A file of tokens without a header is of u16 but where a look says otherwise. */
static ml_status find_format(store *s, bool look) {
    unsigned char head[ML_FILE_HEAD] = {0};
    const char *path = s->file.path;
    int64_t count = s->file.bytes < ML_FILE_HEAD ? s->file.bytes : ML_FILE_HEAD;
    bool binary = store_ends_in(path, ".bin");
    ML_TRY(ml_file_read(&s->file, 0, head, count));
    s->width = binary || store_ends_in(path, ".npy") ? 2 : 1;
    if (binary && s->file.bytes >= 1024 && (word(head) == 20240520 || word(head) == 20240801))
        return read_llmc(s, head);
    if (store_ends_in(path, ".npy") && memcmp(head, "\x93NUMPY", 6) == 0) return read_npy(s);
    const ml_file_kind *known = ml_file_kind_of(head, s->file.bytes);
    if (known) return refuse(s, known->what, known->help);
    if (!look) return ML_OK;
    return s->width == 1 ? check_text(s, head) : find_width(s);
}

/* BASE.idx for BASE.bin, where there is one. */
static bool index_path(const char *path, char *out, size_t size) {
    size_t length = strlen(path);
    if (!store_ends_in(path, ".bin") || length >= size) return false;
    strcpy(out, path);
    memcpy(out + length - 3, "idx", 3);
    return access(out, F_OK) == 0;
}

static ml_status open_format(store *s, store_kind kind, bool look) {
    char index[4096];
    if (s->file.bytes == 0) return ml_fail(ML_IO, "%s is empty", s->file.path);
    s->width = kind == STORE_U32 ? 4 : kind == STORE_U16 ? 2 : 1;
    if (kind == STORE_BY_NAME) {
        if (index_path(s->file.path, index, sizeof index)) return index_open(index, s);
        ML_TRY(find_format(s, look));
    }
    int64_t bytes = s->file.bytes - s->begin;
    if (bytes % s->width)
        return ml_fail(ML_IO, "%s has %lld bytes, which are no whole number of tokens of %d bytes",
                       s->file.path, (long long)bytes, s->width);
    s->tokens = bytes / s->width;
    return ML_OK;
}

ml_status store_open(const char *path, store_kind kind, bool look, store *s) {
    *s = (store){.index.descriptor = -1, .documents = 1, .separator = -1};
    ML_TRY(ml_file_open(path, &s->file));
    ml_status status = open_format(s, kind, look);
    if (status != ML_OK) store_close(s);
    return status;
}

void store_close(store *s) {
    ml_file_close(&s->file);
    ml_file_close(&s->index);
}

/* ---- Reading --------------------------------------------------------------------------------- */

static int64_t token_at(const unsigned char *bytes, int width, int64_t i) {
    bytes += i * width;
    switch (width) {
    case 1: return bytes[0];
    case 2: return bytes[0] | bytes[1] << 8;
    case 4: return word(bytes);
    default: return (int64_t)((uint64_t)word(bytes) | (uint64_t)word(bytes + 4) << 32);
    }
}

static ml_status decode(const store *s, const unsigned char *bytes, int64_t first, int64_t count,
                        int32_t *tokens) {
    for (int64_t i = 0; i < count; i++) {
        int64_t token = token_at(bytes, s->width, i);
        if (token < 0 || token > INT32_MAX)
            return ml_fail(ML_IO, "%lld at byte %lld of %s is not a token: it is not below 2^31",
                           (long long)token, (long long)(s->begin + (first + i) * s->width),
                           s->file.path);
        tokens[i] = (int32_t)token;
    }
    return ML_OK;
}

static ml_status read_file(const store *s, const ml_file *file, int64_t first, int64_t count,
                           int32_t *tokens) {
    enum { BLOCK = 16384 }; /* bytes */
    unsigned char block[BLOCK];
    int64_t most = BLOCK / s->width;
    for (int64_t i = 0; i < count; i += most) {
        int64_t part = count - i < most ? count - i : most;
        ML_TRY(ml_file_read(file, s->begin + (first + i) * s->width, block, part * s->width));
        ML_TRY(decode(s, block, first + i, part, tokens + i));
    }
    return ML_OK;
}

/* A file that was closed between reads. */
static ml_status open_again(const ml_file *before, ml_file *file) {
    ML_TRY(ml_file_open(before->path, file));
    if (file->bytes >= before->bytes) return ML_OK;
    ml_fail(ML_IO, "%s has %lld bytes: it was %lld bytes long when it was opened first",
            before->path, (long long)file->bytes, (long long)before->bytes);
    ml_file_close(file);
    return ML_IO;
}

ml_status store_read(const store *s, int64_t first, int64_t count, int32_t *tokens) {
    if (s->memory) return decode(s, s->memory + first * s->width, first, count, tokens);
    if (!s->reopen) return read_file(s, &s->file, first, count, tokens);
    ml_file file;
    ML_TRY(open_again(&s->file, &file));
    ml_status status = read_file(s, &file, first, count, tokens);
    ml_file_close(&file);
    return status;
}

static ml_status mark_by_index(const store *s, int64_t first, int64_t count,
                               unsigned char *begins) {
    store opened = *s;
    if (!s->reopen) return index_mark(s, first, count, begins);
    ML_TRY(open_again(&s->index, &opened.index));
    ml_status status = index_mark(&opened, first, count, begins);
    ml_file_close(&opened.index);
    return status;
}

ml_status store_mark(const store *s, int64_t first, int64_t count, const int32_t *tokens,
                     unsigned char *begins) {
    if (s->index.path) return mark_by_index(s, first, count, begins);
    if (s->separator < 0 && first == 0) begins[0] = 1;
    for (int64_t i = 0; i < count && s->separator >= 0; i++)
        if (tokens[i] == s->separator) begins[s->separator_first ? i : i + 1] = 1;
    return ML_OK;
}
