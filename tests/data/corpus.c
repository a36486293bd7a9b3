/* Files of tokens and text: what is read at which place. */
#include "runtime/data/corpus.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include "tests/data/support.h"
#include "tests/test.h"

static ml_corpus *open_corpus(const char *spec) {
    ml_corpus *corpus = NULL;
    CHECK_STATUS(ml_corpus_open(spec, ML_CORPUS_BY_NAME, NULL, &corpus), ML_OK);
    REQUIRE(corpus != NULL);
    return corpus;
}

static void check_refused(const data_room *r, const char *spec, const char *expected) {
    ml_corpus *corpus;
    CHECK_STATUS(ml_corpus_open(spec, ML_CORPUS_BY_NAME, NULL, &corpus), ML_IO);
    CHECK(corpus == NULL);
    room_check_error(r, expected);
}

/* All the tokens, which one window holds. */
static void check_tokens(const char *spec, const int32_t *expected, int64_t count) {
    int32_t tokens[64] = {0};
    ml_corpus *corpus = open_corpus(spec);
    REQUIRE(ml_corpus_tokens(corpus) == count && count <= 64);
    ml_corpus_range range = {.to = 1};
    CHECK_STATUS(ml_corpus_sample(corpus, &range, 0, count - 1, tokens, NULL), ML_OK);
    CHECK_EQ_INT(memcmp(tokens, expected, (size_t)count * 4), 0);
    ml_corpus_close(corpus);
}

/* A window that no block holds: every token is where it belongs. */
TEST(data, a_long_window) {
    enum { TOKENS = 20001 };
    static uint16_t tokens[TOKENS];
    static int32_t inputs[TOKENS], targets[TOKENS];
    data_room r;
    room_enter(&r);
    for (int i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)(i * 7919);
    ml_corpus *corpus = open_corpus(room_put(&r, "a.bin", "wb", tokens, sizeof tokens));
    CHECK_EQ_INT(ml_corpus_tokens(corpus), TOKENS);
    ml_corpus_range range = {.to = 1};
    CHECK_STATUS(ml_corpus_fill(corpus, &range, 0, 1, TOKENS - 1, 0, &(ml_batch){inputs, targets}),
                 ML_OK);
    int wrong = 0;
    for (int i = 0; i + 1 < TOKENS; i++)
        wrong += inputs[i] != tokens[i] || targets[i] != tokens[i + 1];
    CHECK_EQ_INT(wrong, 0);
    ml_corpus_close(corpus);
    room_leave(&r);
}

/* Text that was replaced by as much of the same time is no longer what the cache holds. */
TEST(data, text_of_the_same_time) {
    const struct timespec times[2] = {{.tv_sec = 1600000000}, {.tv_sec = 1600000000}};
    data_room r;
    room_enter(&r);
    for (int i = 0; i < 2; i++) {
        const char *path =
            room_put(&r, "a.jsonl", "wb", i ? "{\"text\":\"b\"}" : "{\"text\":\"a\"}", 12);
        CHECK(utimensat(AT_FDCWD, path, times, 0) == 0);
        check_tokens(path, (int32_t[]){'a' + i, '\n'}, 2);
    }
    room_leave(&r);
}

/* More files than may be open: they are opened for each read, indexes too. */
TEST(data, more_files_than_may_be_open) {
    enum { SETS = 12, COUNT = 2 * SETS };
    static const uint16_t tokens[] = {7, 8};
    static const int32_t lengths[] = {1, 1};
    struct rlimit whole;
    char name[16];
    int32_t read[COUNT] = {0};
    unsigned char begins[COUNT + 1];
    data_room r;
    room_enter(&r);
    for (int i = 0; i < SETS; i++) {
        snprintf(name, sizeof name, "s%02d.bin", i);
        room_put(&r, name, "wb", tokens, sizeof tokens);
        strcpy(name + 4, "idx");
        room_put_index(&r, name, 8, lengths, 2, 2);
    }
    REQUIRE(getrlimit(RLIMIT_NOFILE, &whole) == 0);
    struct rlimit small = {20, whole.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &small) == 0);
    ml_corpus *corpus = open_corpus(room_path(&r, "*.bin"));
    ml_corpus_range range = {.to = 1};
    CHECK_STATUS(ml_corpus_sample(corpus, &range, 0, COUNT - 1, read, begins), ML_OK);
    for (int i = 0; i < COUNT; i++) CHECK(read[i] == tokens[i % 2] && begins[i] == 1);
    CHECK(truncate(room_path(&r, "s11.idx"), 40) == 0);
    CHECK_STATUS(ml_corpus_sample(corpus, &range, 0, COUNT - 1, read, begins), ML_IO);
    room_check_error(&r, "DIR/s11.idx has 40 bytes: it was 82 bytes long when it was opened first");
    ml_corpus_close(corpus);
    CHECK(setrlimit(RLIMIT_NOFILE, &whole) == 0);
    room_leave(&r);
}

/* Each window of an epoch once, in another order and at another place in the next one. */
TEST(data, epochs) {
    enum { TOKENS = 1000, LENGTH = 7, WINDOWS = 999 / LENGTH - 1 };
    static uint16_t stored[TOKENS];
    int32_t tokens[LENGTH + 1], first[2][WINDOWS];
    data_room r;
    room_enter(&r);
    for (int i = 0; i < TOKENS; i++) stored[i] = (uint16_t)(i + 300);
    ml_corpus *corpus = open_corpus(room_put(&r, "a.bin", "wb", stored, sizeof stored));
    ml_corpus_range range = {.seed = 4, .to = 1};
    for (int epoch = 0; epoch < 2; epoch++) {
        int seen[TOKENS] = {0}, wrong = 0;
        for (int i = 0; i < WINDOWS; i++) {
            CHECK_STATUS(
                ml_corpus_sample(corpus, &range, epoch * WINDOWS + i, LENGTH, tokens, NULL), ML_OK);
            first[epoch][i] = tokens[0];
            for (int k = 0; k < LENGTH; k++) wrong += seen[tokens[k] - 300]++;
        }
        CHECK_EQ_INT(wrong, 0);
    }
    CHECK(memcmp(first[0], first[1], sizeof first[0]) != 0);
    ml_corpus_close(corpus);
    room_leave(&r);
}

/* Of 8 GiB, which are neither read whole nor mapped, only a window is. */
TEST(data, a_sparse_corpus_of_8_gib) {
    const int64_t tokens = (int64_t)4 << 30;
    const uint16_t last[3] = {11, 22, 33};
    struct rlimit whole;
    int32_t read[4];
    data_room r;
    room_enter(&r);
    REQUIRE(truncate(room_put(&r, "sparse.bin", "wb", "", 0), 2 * tokens - 6) == 0);
    room_put(&r, "sparse.bin", "ab", last, 6);
    REQUIRE(getrlimit(RLIMIT_AS, &whole) == 0);
#ifndef __SANITIZE_ADDRESS__ /* which reserves terabytes */
    const struct rlimit small = {(rlim_t)4 << 30, whole.rlim_max};
    REQUIRE(setrlimit(RLIMIT_AS, &small) == 0);
#endif
    ml_corpus *corpus = open_corpus(r.path);
    CHECK_EQ_INT(ml_corpus_tokens(corpus), tokens);
    ml_corpus_range range = {.from = (double)(tokens - 4) / (double)tokens, .to = 1};
    CHECK_STATUS(ml_corpus_sample(corpus, &range, 0, 3, read, NULL), ML_OK);
    CHECK(setrlimit(RLIMIT_AS, &whole) == 0);
    const int32_t expected[4] = {0, 11, 22, 33};
    CHECK_EQ_INT(memcmp(read, expected, sizeof read), 0);
    ml_corpus_close(corpus);
    room_leave(&r);
}

TEST(data, a_corpus_that_is_shortened) {
    char text[1000];
    int32_t tokens[1000];
    data_room r;
    room_enter(&r);
    memset(text, 'a', sizeof text);
    ml_corpus *corpus = open_corpus(room_put(&r, "book.txt", "wb", text, sizeof text));
    ml_corpus_range whole = {.to = 1}, begin = {.to = 0.6};
    CHECK_STATUS(ml_corpus_sample(corpus, &whole, 0, 999, tokens, NULL), ML_OK);
    REQUIRE(truncate(r.path, 700) == 0);
    CHECK_STATUS(ml_corpus_sample(corpus, &begin, 0, 500, tokens, NULL), ML_OK);
    CHECK_STATUS(ml_corpus_sample(corpus, &whole, 0, 999, tokens, NULL), ML_IO);
    room_check_error(&r, "DIR/book.txt ends before byte 700: it was 1000 bytes long when it was "
                         "opened, and was shortened since");
    /* What is appended is not seen: the range is that of the opening. */
    room_put(&r, "book.txt", "wb", text, sizeof text);
    room_put(&r, "book.txt", "ab", text, sizeof text);
    CHECK_EQ_INT(ml_corpus_tokens(corpus), 1000);
    CHECK_STATUS(ml_corpus_sample(corpus, &whole, 0, 999, tokens, NULL), ML_OK);
    ml_corpus_close(corpus);
    room_leave(&r);
}

TEST(data, formats_of_tokens) {
    static const uint32_t wide[] = {70000, 5, 300, 1 << 17, 7};
    static const int32_t expected[] = {70000, 5, 300, 1 << 17, 7}, narrow[] = {9, 60000, 2};
    static const uint16_t small[] = {9, 60000, 2};
    static const int64_t numbers[] = {70000, 5, 300, 1 << 17, 7};
    int32_t header[256] = {20240520, 1, 3};
    data_room r;
    room_enter(&r);
    room_put(&r, "llmc.bin", "wb", header, sizeof header);
    check_tokens(room_put(&r, "llmc.bin", "ab", small, sizeof small), narrow, 3);
    header[0] = 20240801, header[1] = 7, header[2] = 5;
    room_put(&r, "llama.bin", "wb", header, sizeof header);
    check_tokens(room_put(&r, "llama.bin", "ab", wide, sizeof wide), expected, 5);
    room_put(&r, "llama.bin", "ab", "x", 1);
    check_refused(&r, r.path,
                  "DIR/llama.bin has 1045 bytes: its header says 5 tokens at byte 8, "
                  "which are 1044");
    char npy[129] = "\x93NUMPY\1\0\x76\0{'descr': '<i8', 'fortran_order': False, 'shape': (5,), }";
    memset(npy + strlen(npy + 10) + 10, ' ', 128 - strlen(npy + 10) - 10);
    npy[127] = '\n';
    room_put(&r, "a.npy", "wb", npy, 128);
    check_tokens(room_put(&r, "a.npy", "ab", numbers, sizeof numbers), expected, 5);
    check_tokens(room_put(&r, "plain.bin", "wb", small, sizeof small), narrow, 3);
    ml_corpus *corpus;
    room_put(&r, "plain.bin", "wb", wide, sizeof wide);
    CHECK_STATUS(ml_corpus_open(r.path, ML_CORPUS_U32, NULL, &corpus), ML_OK);
    CHECK_EQ_INT(ml_corpus_tokens(corpus), 5);
    ml_corpus_close(corpus);
    static uint32_t many[500]; /* u32 is seen by the content */
    for (uint32_t i = 0; i < 500; i++) many[i] = i * 7919 % 50257;
    corpus = open_corpus(room_put(&r, "u32.bin", "wb", many, sizeof many));
    CHECK_EQ_INT(ml_corpus_tokens(corpus), 500);
    ml_corpus_close(corpus);
    room_leave(&r);
}

TEST(data, megatron_files) {
    static const uint16_t tokens[] = {1, 2, 3, 4, 5, 6, 7};
    static const int32_t lengths[] = {3, 4}, expected[] = {1, 2, 3, 4, 5, 6, 7};
    data_room r;
    room_enter(&r);
    room_put(&r, "set.bin", "wb", tokens, sizeof tokens);
    room_put_index(&r, "set.idx", 8, lengths, 2, 2);
    check_tokens(room_path(&r, "set"), expected, 7);
    check_tokens(room_path(&r, "set.bin"), expected, 7);
    check_tokens(room_path(&r, "set.idx"), expected, 7);
    static const int32_t wrong[] = {3, 5};
    room_put_index(&r, "set.idx", 8, wrong, 2, 2);
    check_refused(&r, room_path(&r, "set"),
                  "DIR/set.idx is damaged at byte 50: a sequence lies outside the .bin file");
    room_put_index(&r, "set.idx", 6, lengths, 2, 2);
    check_refused(&r, room_path(&r, "set"),
                  "DIR/set.idx is damaged at byte 17: the dtype is none of u8, u16, i32 and i64");
    room_leave(&r);
}

/* Files of a source follow one another as one stream; each is the size that it has. */
TEST(data, several_files_are_one_stream) {
    data_room r;
    char spec[512], folder[128];
    room_enter(&r);
    strcpy(folder, room_path(&r, ""));
    room_put(&r, "b.txt", "wb", "cde", 3);
    room_put(&r, "a.txt", "wb", "ab", 2);
    room_put(&r, "c.md", "wb", "no", 2);
    static const int32_t expected[] = {'a', 'b', 'c', 'd', 'e'};
    check_tokens(folder, expected, 5);
    check_tokens(room_path(&r, "*.txt"), expected, 5);
    snprintf(spec, sizeof spec, "%s/a.txt, %s/b.txt", r.folder, r.folder);
    check_tokens(spec, expected, 5);
    snprintf(spec, sizeof spec, "%s/a.txt:0.7,%s/b.txt", r.folder, r.folder);
    ml_corpus *corpus;
    CHECK_STATUS(ml_corpus_open(spec, ML_CORPUS_BY_NAME, NULL, &corpus), ML_INVALID);
    room_check_error(&r, "data=\"DIR/a.txt:0.7,DIR/b.txt\" gives a weight to 1 of its 2 parts");
    check_refused(&r, room_path(&r, "*.jsonl"), "no file is called DIR/*.jsonl");
    check_refused(&r, room_path(&r, "none"), "cannot open DIR/none: No such file or directory");
    room_leave(&r);
}

TEST(data, a_blend_draws_by_weight) {
    data_room r;
    char spec[512], text[300];
    int32_t token[2], count = 0;
    room_enter(&r);
    memset(text, 'a', sizeof text);
    room_put(&r, "a.txt", "wb", text, sizeof text);
    memset(text, 'b', sizeof text);
    room_put(&r, "b.txt", "wb", text, sizeof text);
    snprintf(spec, sizeof spec, "%s/a.txt:0.7,%s/b.txt:0.3", r.folder, r.folder);
    ml_corpus *corpus = open_corpus(spec);
    ml_corpus_range range = {.to = 1};
    for (int i = 0; i < 1000; i++) {
        CHECK_STATUS(ml_corpus_sample(corpus, &range, i, 1, token, NULL), ML_OK);
        count += token[0] == 'a';
        CHECK_NEAR(count, 0.7 * (i + 1), 1.0 / (count > 1 ? count : 1));
    }
    CHECK_EQ_INT(count, 700);
    ml_corpus_close(corpus);
    room_leave(&r);
}

static size_t gzip(const char *text, size_t count, unsigned char *out, size_t room) {
    z_stream z = {.next_in = (Bytef *)text,
                  .avail_in = (uInt)count,
                  .next_out = out,
                  .avail_out = (uInt)room};
    REQUIRE(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, 0) == Z_OK);
    REQUIRE(deflate(&z, Z_FINISH) == Z_STREAM_END);
    deflateEnd(&z);
    return z.total_out;
}

/* The bytes of all documents, through the cache. */
static void check_text(const char *path, const char *expected) {
    int32_t tokens[64];
    size_t count = strlen(expected);
    for (size_t i = 0; i < count; i++) tokens[i] = (unsigned char)expected[i];
    check_tokens(path, tokens, (int64_t)count);
    check_tokens(path, tokens, (int64_t)count); /* as cached */
}

TEST(data, text_in_lines_and_compressed) {
    static const char lines[] = "{\"text\": \"one\"}\n\n{\"id\": 1, \"text\": \"tw\\u00f6\\n\"}\r\n"
                                "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}";
    static const char text[] = "one\ntw\xc3\xb6\n<|im_start|>user\nhi<|im_end|>\n";
    unsigned char packed[2][512];
    data_room r;
    room_enter(&r);
    check_text(room_put(&r, "a.jsonl", "wb", lines, sizeof lines - 1), text);
    size_t first = gzip(lines, 20, packed[0], 512);
    size_t second = gzip(lines + 20, sizeof lines - 21, packed[1], 512);
    room_put(&r, "b.jsonl.gz", "wb", packed[0], first);
    check_text(room_put(&r, "mark.jsonl", "wb", "\xef\xbb\xbf{\"text\":\"hi\"}\r\n", 18), "hi\n");
    check_text(room_put(&r, "b.jsonl.gz", "ab", packed[1], second), text);
    first = ZSTD_compress(packed[0], 512, lines, sizeof lines - 1, 3);
    check_text(room_put(&r, "c.jsonl.zst", "wb", packed[0], first), text);
    char expected[128];
    snprintf(expected, sizeof expected,
             "DIR/d.jsonl.zst is damaged before byte %d: it ends within compressed data",
             (int)first - 9);
    check_refused(&r, room_put(&r, "d.jsonl.zst", "wb", packed[0], first - 9), expected);
    first = ZSTD_compress(packed[0], 512, "only text", 9, 3);
    check_text(room_put(&r, "e.txt.zst", "wb", packed[0], first), "only text\n");
    check_refused(&r, room_put(&r, "e.jsonl", "wb", "{\"text\": \"a\"}\n{\"text\": 5}\n", 27),
                  "DIR/e.jsonl, line 2, byte 14: neither the string text nor the list messages");
    check_refused(&r, room_put(&r, "f.jsonl", "wb", "{\"text\": \"a\"}\n{\"text: 5}\n", 25),
                  "DIR/f.jsonl, line 2, byte 24: premature end of input near '\"text: 5}'");
    room_leave(&r);
}

TEST(data, a_token_beyond_the_vocabulary) {
    static const uint16_t tokens[] = {1, 2, 3, 400};
    int32_t read[4];
    data_room r;
    room_enter(&r);
    ml_corpus *corpus = open_corpus(room_put(&r, "a.bin", "wb", tokens, sizeof tokens));
    ml_corpus_range range = {.to = 1, .vocab = 400};
    CHECK_STATUS(ml_corpus_sample(corpus, &range, 0, 3, read, NULL), ML_IO);
    room_check_error(&r, "token 400 at offset 6 of DIR/a.bin is not below vocab=400");
    ml_corpus_close(corpus);
    room_leave(&r);
}

/* Where documents begin: by the index over files' ends, by the separator, by files. */
TEST(data, beginnings_of_documents) {
    static const uint16_t tokens[] = {50256, 2, 3, 50256, 5, 6, 7};
    static const int32_t lengths[] = {3, 0, 1, 3};
    const int32_t header[256] = {20240520, 1, 7};
    unsigned char begins[9];
    int32_t read[7];
    data_room r;
    room_enter(&r);
    room_put(&r, "set.bin", "wb", tokens, sizeof tokens);
    room_put_index(&r, "set.idx", 8, lengths, 4, 2);
    room_put(&r, "llmc.bin", "wb", header, sizeof header);
    room_put(&r, "llmc.bin", "ab", tokens, sizeof tokens);
    room_put(&r, "plain.bin", "wb", tokens, sizeof tokens);
    room_put(&r, "a.txt", "wb", "abc", 3);
    room_put(&r, "b.txt", "wb", "defg", 4);
    /* Documents of two sequences each: the same index, but for its end. */
    unsigned char index[34 + 4 * 4 + 4 * 8 + 3 * 8] = {0};
    FILE *file = fopen(room_path(&r, "set.idx"), "rb");
    REQUIRE(file && fread(index, 1, sizeof index, file) == sizeof index && fclose(file) == 0);
    for (int i = 0; i < 3; i++) index[sizeof index - 24 + 8 * i] = (unsigned char)(2 * i);
    index[26] = 3;
    room_put(&r, "two.idx", "wb", index, sizeof index);
    room_put(&r, "two.bin", "wb", tokens, sizeof tokens);
    static const char *const names[] = {"set", "two", "llmc.bin", "?.txt"};
    static const char expected[][8] = {"1001100", "1001000", "1001000", "1001000"};
    for (int i = 0; i < 4; i++) {
        ml_corpus *corpus = open_corpus(room_path(&r, names[i]));
        ml_corpus_range range = {.to = 1};
        CHECK(ml_corpus_unmarked(corpus) == NULL);
        CHECK_STATUS(ml_corpus_sample(corpus, &range, 0, 6, read, begins), ML_OK);
        for (int k = 0; k < 7; k++) CHECK_EQ_INT(begins[k], expected[i][k] - '0');
        ml_corpus_close(corpus);
    }
    ml_corpus *corpus = open_corpus(room_path(&r, "plain.bin"));
    CHECK_TEXT(ml_corpus_unmarked(corpus), r.path);
    int32_t inputs[6], targets[6], documents[6], positions[6];
    const unsigned char marks[] = {0, 0, 1, 0, 0, 1, 0, 0};
    static const int32_t numbers[] = {0, 0, 1, 1, 1, 2}, places[] = {0, 1, 0, 1, 2, 0};
    const ml_batch batch = {inputs, targets, documents, positions};
    ml_batch_put(&batch, 0, 6, (int32_t[]){1, 2, 3, 4, 5, 6, 7}, marks);
    CHECK_EQ_INT(memcmp(documents, numbers, sizeof numbers), 0);
    CHECK_EQ_INT(memcmp(positions, places, sizeof places), 0);
    CHECK(targets[1] == -1 && targets[4] == -1 && targets[5] == 7 && targets[0] == 2);
    ml_corpus_close(corpus);
    room_leave(&r);
}
