/* Damaged files of every format: refused or read, and nothing else happens (under ASan too). Each
 * input is a whole file with some bytes changed, cut off or added, or begins as one and is drawn.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include "runtime/data/corpus.h"
#include "runtime/data/text.h"
#include "tests/data/support.h"
#include "tests/test.h"

enum { MOST = 4096, KINDS = 9 };
static const char *const names[KINDS] = {"a.bin", "b.npy",   "c.jsonl", "d.jsonl.gz", "e.txt.zst",
                                         "f.bin", "set.bin", "set.idx", "g.txt"};
typedef struct {
    unsigned char bytes[MOST];
    size_t count;
} file_bytes;

static void add(file_bytes *f, const void *bytes, size_t count) {
    REQUIRE(f->count + count <= MOST);
    memcpy(f->bytes + f->count, bytes, count);
    f->count += count;
}

static void read_back(data_room *r, const char *name, file_bytes *f) {
    FILE *file = fopen(room_path(r, name), "rb");
    REQUIRE(file != NULL);
    f->count = fread(f->bytes, 1, MOST, file);
    fclose(file);
}

static void make_seeds(data_room *r, file_bytes *seeds) {
    static const char text[] =
        "{\"text\": \"a \\u00e9 line\"}\n{\"messages\": [{\"role\": \"user\", "
        "\"content\": \"hello\"}, {\"role\": \"x\", \"content\": \"\"}]}\n";
    static const int32_t lengths[] = {3, 1, 4, 8};
    uint16_t tokens[300];
    int32_t header[256] = {20240520, 1, 300};
    char npy[129] =
        "\x93NUMPY\1\0\x76\0{'descr': '<u2', 'fortran_order': False, 'shape': (300,), }";
    for (int i = 0; i < 300; i++) tokens[i] = (uint16_t)(i * 131);
    add(&seeds[0], header, sizeof header);
    add(&seeds[0], tokens, sizeof tokens);
    memset(npy + 10 + strlen(npy + 10), ' ', 128 - 10 - strlen(npy + 10));
    add(&seeds[1], npy, 128);
    add(&seeds[1], tokens, sizeof tokens);
    add(&seeds[2], text, sizeof text - 1);
    gzFile gz = gzopen(room_path(r, "seed"), "wb");
    REQUIRE(gz && gzwrite(gz, text, sizeof text - 1) > 0 && gzclose(gz) == Z_OK);
    read_back(r, "seed", &seeds[3]);
    seeds[4].count = ZSTD_compress(seeds[4].bytes, MOST, text, sizeof text - 1, 3);
    add(&seeds[5], tokens, sizeof tokens);
    add(&seeds[6], tokens, 32);
    room_put_index(r, "seed", 8, lengths, 4, 2);
    read_back(r, "seed", &seeds[7]);
    add(&seeds[8], text, sizeof text - 1);
}

/* Small numbers and those at the ends of ranges break more than others do. */
static void damage(file_bytes *f, uint64_t *state) {
    static const unsigned char odd[] = {0, 1, 0x7f, 0x80, 0xff, '{', '"', '\n', '\'', '('};
    int changes = (int)test_range(state, 1, 6);
    for (int i = 0; i < changes && f->count > 0; i++) {
        size_t at = (size_t)test_range(state, 0, (int64_t)f->count - 1);
        if (test_range(state, 0, 1)) at %= 48; /* headers */
        if (at >= f->count) at = 0;
        switch (test_range(state, 0, 5)) {
        case 0: f->bytes[at] ^= (unsigned char)(1 << test_range(state, 0, 7)); break;
        case 1: f->bytes[at] = odd[test_range(state, 0, sizeof odd - 1)]; break;
        case 2: f->bytes[at] = (unsigned char)test_random(state); break;
        case 3: f->count = at; break;
        case 4:
            for (size_t k = at; k < f->count && k < at + 8; k++) f->bytes[k] = odd[i % 5];
            break;
        default:
            if (f->count + 8 < MOST) memset(f->bytes + f->count, odd[i % 5], 8), f->count += 8;
        }
    }
}

static ml_status count_text(void *context, text_place place, const char *line, size_t count) {
    int64_t *sum = context;
    ml_bytes held = {0};
    const char *text;
    size_t bytes;
    char *copy = malloc(count + 1); /* whose end a sanitizer knows */
    REQUIRE(copy != NULL);
    ml_status status = text_of(place, memcpy(copy, line, count), count, &held, &text, &bytes);
    for (size_t i = 0; status == ML_OK && text && i < bytes; i++) *sum += (unsigned char)text[i];
    *sum += place.ends;
    ml_bytes_free(&held);
    free(copy);
    return status;
}

/* Text is read without the cache, which would keep every input. */
static ml_status try_file(const char *path) {
    ml_corpus *corpus;
    int32_t tokens[9];
    unsigned char begins[10];
    int64_t sum = 0;
    if (text_is_name(path)) return text_read(path, count_text, &sum);
    ML_TRY(ml_corpus_open(path, ML_CORPUS_BY_NAME, NULL, &corpus));
    ml_corpus_range range = {.seed = 1, .to = 1, .vocab = 40000};
    ml_status status = ML_OK;
    for (int i = 0; i < 4 && status == ML_OK; i++)
        status = ml_corpus_sample(corpus, &range, i * 1000003, 8, tokens, begins);
    ml_corpus_close(corpus);
    return status;
}

static void fuzz(int64_t inputs, uint64_t seed) {
    static file_bytes seeds[KINDS];
    int64_t refused = 0, wrong = 0;
    data_room r;
    memset(seeds, 0, sizeof seeds);
    room_enter(&r);
    make_seeds(&r, seeds);
    for (int k = 0; k < KINDS; k++) room_put(&r, names[k], "wb", seeds[k].bytes, seeds[k].count);
    for (int k = 0; k < KINDS; k++) CHECK_STATUS(try_file(room_path(&r, names[k])), ML_OK);
    for (int64_t i = 0; i < inputs; i++) {
        int kind = (int)(i % KINDS);
        file_bytes f = seeds[kind];
        damage(&f, &seed);
        unlink(room_path(&r, names[kind])); /* shortening a file in place waits for the disk */
        FILE *file = fopen(r.path, "wb");
        REQUIRE(file && fwrite(f.bytes, 1, f.count, file) == f.count && fclose(file) == 0);
        ml_status status = try_file(kind == 7 ? room_path(&r, names[6]) : r.path);
        refused += status != ML_OK;
        wrong += status != ML_OK && status != ML_IO;
        wrong += status != ML_OK && !strstr(ml_error_last()->text, r.folder);
        if (kind < 6) continue;
        unlink(room_path(&r, names[kind]));
        room_put(&r, names[kind], "wb", seeds[kind].bytes, seeds[kind].count);
    }
    CHECK_EQ_INT(wrong, 0); /* every error is of the file, and names it */
    CHECK(refused > inputs / 4 && refused < inputs);
    room_leave(&r);
}

TEST(data, fuzz) {
    fuzz(4000, 17);
}

TEST(long, data_fuzz) {
    fuzz(1000000, 18);
}
