/* SentencePiece's compiled map of characters: its rules, and damaged ones. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/text/tokenizer.h"
#include "tests/test.h"

enum { UNITS = 256 * 20 };
static const char *const rules[][2] = {
    {"\xEF\xAC\x81", "fi"},    /* a ligature */
    {"\xEF\xBC\xA1", "A"},     /* a full-width letter */
    {"\xC2\xAD", ""},          /* a soft hyphen */
    {"\xE3\x80\x80", " "},     /* an ideographic space */
    {"i\xCC\x81", "\xC3\xAD"}, /* two characters to one */
    {"a", "x"},                /* prefixes of each other */
    {"ab", "y"},
    {"abcd", "z"},
};

typedef struct {
    uint32_t trie_bytes, trie[UNITS];
    char texts[64];
    size_t text_bytes;
} charsmap;

/* A Darts double array with 256 units for the bytes that follow each prefix. */
static void make_charsmap(charsmap *map) {
    uint32_t blocks = 2;
    *map = (charsmap){.trie_bytes = sizeof map->trie, .trie = {1 << 10 | 1 << 9 /* 256 */}};
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
        uint32_t base = 256, at = 0;
        for (const char *p = rules[r][0]; *p; p++) {
            at = base + (unsigned char)*p;
            if (!map->trie[at]) map->trie[at] = (at ^ 256 * blocks++) << 10 | (unsigned char)*p;
            base = at ^ map->trie[at] >> 10;
        }
        map->trie[at] |= 1 << 8;
        map->trie[base] = 1u << 31 | (uint32_t)map->text_bytes;
        strcpy(map->texts + map->text_bytes, rules[r][1]);
        map->text_bytes += strlen(rules[r][1]) + 1;
    }
    REQUIRE(blocks * 256 <= UNITS);
}

/* ---- A model of single characters -------------------------------------------------------------
 */

static void add_varint(FILE *to, size_t value) {
    for (; value > 0x7F; value >>= 7) fputc((int)(value & 0x7F) | 0x80, to);
    fputc((int)value, to);
}

static void add_piece(FILE *to, const char *text, int type) {
    size_t bytes = strlen(text);
    fprintf(to, "\x0A%c\x0A%c%s\x15", (int)bytes + 9, (int)bytes, text);
    fwrite(&(float){-1}, 4, 1, to);
    fprintf(to, "\x18%c", type);
}

/* The first `bytes` bytes of the map in a model of that type (1: unigram, 2: BPE), with a symbol of
 * the user or NULL. */
static ml_status open_symbols(const charsmap *map, size_t bytes, int type, const char *symbol,
                              ml_tokenizer **t) {
    static const char *const pieces[] = {
        "\xE2\x96\x81", "a", "b", "c", "d", "x", "y", "z", "f", "i", "A", "\xC3\xAD"};
    char path[64];
    snprintf(path, sizeof path, "/tmp/mlua-charsmap-%d.model", (int)getpid());
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    add_piece(file, "<unk>", 2);
    add_piece(file, "<s>", 3);
    add_piece(file, "</s>", 3);
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) add_piece(file, pieces[i], 1);
    if (symbol) add_piece(file, symbol, 4);
    fprintf(file, "\x12\x02\x18%c\x1A", type);
    size_t head = 2;
    for (size_t left = bytes; left > 0x7F; left >>= 7) head++;
    add_varint(file, head + bytes);
    fputc(0x12, file);
    add_varint(file, bytes);
    size_t trie = bytes < 4 + sizeof map->trie ? bytes : 4 + sizeof map->trie;
    fwrite(map, 1, trie, file);
    fwrite(map->texts, 1, bytes - trie, file);
    fclose(file);
    ml_status status = ml_tokenizer_open(path, t);
    unlink(path);
    return status;
}

static ml_status open_model(const charsmap *map, size_t bytes, int type, ml_tokenizer **t) {
    return open_symbols(map, bytes, type, NULL, t);
}

static size_t size_of(const charsmap *map) {
    return 4 + sizeof map->trie + map->text_bytes;
}

static void check_text(const ml_tokenizer *t, const char *text, const char *expected) {
    ml_ids ids = {0};
    ml_bytes back = {0};
    CHECK_STATUS(ml_tokenizer_encode(t, text, strlen(text), 0, &ids), ML_OK);
    CHECK_STATUS(ml_tokenizer_decode(t, ids.at, ids.count, 0, &back), ML_OK);
    CHECK_STATUS(ml_bytes_add(&back, "", 1), ML_OK);
    CHECK_TEXT(back.at, expected);
    ml_ids_free(&ids);
    ml_bytes_free(&back);
}

TEST(text, charsmap_rules) {
    charsmap map;
    make_charsmap(&map);
    for (int type = 1; type <= 2; type++) {
        ml_tokenizer *t;
        REQUIRE(open_model(&map, size_of(&map), type, &t) == ML_OK);
        static const char *const cases[][2] = {
            {"", ""},
            {"\xEF\xAC\x81", "fi"},
            {"c\xEF\xAC\x81 \xEF\xBC\xA1", "cfi A"},
            {"b\xC2\xAD"
             "d",
             "bd"},
            {"\xC2\xAD", ""},
            {"\xE3\x80\x80 b \xE3\x80\x80 c\xE3\x80\x80", "b c"},
            {"i\xCC\x81i", "\xC3\xADi"},
            {"a", "x"},
            {"ab", "y"},
            {"abc", "yc"},
            {"abcd", "z"},
            {"abcabcdaab", "yczxy"},
            {"b \xEF\xAC", "b  \xE2\x81\x87 "}, /* a rule cut off by the text's end */
        };
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            check_text(t, cases[i][0], cases[i][1]);
        ml_ids ids = {0};
        CHECK_STATUS(ml_tokenizer_encode(t, "\xEF\xAC\x81", 3, 0, &ids), ML_OK);
        CHECK(ids.count == 3 && ids.at[0] == 3 && ids.at[1] == 11 && ids.at[2] == 12);
        ml_ids_free(&ids);
        ml_tokenizer_close(t);
    }
}

/* Symbols of the user stay as they are, whatever the map says; the spaces around them too, and only
 * the text's beginning has one prepended. */
TEST(text, charsmap_leaves_symbols) {
    charsmap map;
    make_charsmap(&map);
    for (int type = 1; type <= 2; type++) {
        ml_tokenizer *t;
        ml_ids ids = {0};
        REQUIRE(open_symbols(&map, size_of(&map), type, "\xEF\xAC\x81", &t) == ML_OK);
        const char *text = " b  \xEF\xAC\x81 c\xEF\xAC\x81\xEF\xBC\xA1 ";
        CHECK_STATUS(ml_tokenizer_encode(t, text, strlen(text), 0, &ids), ML_OK);
        const uint32_t expected[] = {3, 5, 3, 15, 3, 6, 15, 13}; /* "_b_" fi "_c" fi "A" */
        CHECK(ids.count == 8 && memcmp(ids.at, expected, sizeof expected) == 0);
        check_text(t, text,
                   "b \xEF\xAC\x81 c\xEF\xAC\x81"
                   "A");
        ml_ids_free(&ids);
        ml_tokenizer_close(t);
    }
}

static void write_base64(FILE *to, const unsigned char *at, size_t bytes) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < bytes; i += 3) {
        unsigned bits = 0;
        for (size_t k = i; k < i + 3; k++) bits = bits << 8 | (k < bytes ? at[k] : 0);
        for (size_t k = 0; k < 4; k++)
            fputc(i + k <= bytes ? digits[bits >> (18 - 6 * k) & 63] : '=', to);
    }
}

/* The first `bytes` bytes of the map in a tokenizer.json. */
static ml_status open_json(const charsmap *map, size_t bytes, const char *more, ml_tokenizer **t) {
    static const char *const pieces[] = {"a", "b", "x", "y", "i", "f", "A", "\xC3\xAD", "\xCC\x81"};
    unsigned char file_map[sizeof *map];
    memcpy(file_map, map, 4 + sizeof map->trie);
    memcpy(file_map + 4 + sizeof map->trie, map->texts, map->text_bytes);
    char path[64];
    snprintf(path, sizeof path, "/tmp/mlua-charsmap-%d.json", (int)getpid());
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    fprintf(file, "{\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"");
    write_base64(file, file_map, bytes);
    fprintf(file, "%s\"},\"decoder\":{\"type\":\"Fuse\"},\"model\":{\"type\":\"Unigram\",", more);
    fprintf(file, "\"unk_id\":0,\"vocab\":[[\"?\",0]");
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        fprintf(file, ",[\"%s\",-1]", pieces[i]);
    fprintf(file, "]}}");
    fclose(file);
    ml_status status = ml_tokenizer_open(path, t);
    unlink(path);
    return status;
}

TEST(text, charsmap_of_hugging_face) {
    charsmap map;
    ml_tokenizer *t;
    make_charsmap(&map);
    REQUIRE(open_json(&map, size_of(&map), "", &t) == ML_OK);
    static const char *const cases[][2] = {
        {"", ""},
        {"\xEF\xAC\x81\xEF\xBC\xA1", "fiA"},
        {"abb", "xbb"},               /* graphemes one by one: "ab" is none */
        {"i\xCC\x81i", "\xC3\xADi"},  /* one of two characters */
        {"a\xCC\x81i", "xi"},         /* of which the rule has the first: both are replaced */
        {"a\xCC\x81\xCC\x81", "x"},   /* 5 bytes */
        {"a\xCC\x81\xCC\x81\xCC\x81", /* more: its characters one by one */
         "x\xCC\x81\xCC\x81\xCC\x81"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_text(t, cases[i][0], cases[i][1]);
    ml_tokenizer_close(t);
    CHECK_STATUS(open_json(&map, 1000, "", &t), ML_INVALID);
    CHECK(strstr(ml_error_last()->text, "precompiled_charsmap is cut off") != NULL);
    CHECK_STATUS(open_json(&map, size_of(&map), "!", &t), ML_INVALID);
    CHECK(strstr(ml_error_last()->text, "precompiled_charsmap is no base64") != NULL);
}

/* ---- Damage -----------------------------------------------------------------------------------
 */

static const char sample[] = "abcd \xEF\xAC\x81 \xC2\xAD\xEF\xBC\xA1\xE3\x80\x80i\xCC\x81 q\xEF";

/* What is opened can be used. */
static void use(ml_tokenizer *t) {
    ml_ids ids = {0};
    ml_bytes back = {0};
    CHECK_STATUS(ml_tokenizer_encode(t, sample, sizeof sample - 1, 0, &ids), ML_OK);
    CHECK_STATUS(ml_tokenizer_decode(t, ids.at, ids.count, 0, &back), ML_OK);
    ml_ids_free(&ids);
    ml_bytes_free(&back);
    ml_tokenizer_close(t);
}

static void check_refused(const charsmap *map, size_t bytes) {
    ml_tokenizer *t;
    CHECK_STATUS(open_model(map, bytes, 1, &t), ML_INVALID);
    CHECK(strstr(ml_error_last()->text, "precompiled_charsmap is cut off") != NULL);
}

TEST(text, charsmap_cut_off) {
    charsmap map;
    ml_tokenizer *t;
    make_charsmap(&map);
    size_t trie = 4 + sizeof map.trie, cuts[] = {1, 3, 4, 5, 8, 1000, trie - 1};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) check_refused(&map, cuts[i]);
    for (size_t bytes = trie; bytes <= size_of(&map); bytes++)
        if (CHECK_STATUS(open_model(&map, bytes, 1, &t), ML_OK)) use(t);
    uint32_t sizes[] = {0, 2, 6, sizeof map.trie + 64, UINT32_MAX, UINT32_MAX - 3};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        map.trie_bytes = sizes[i];
        check_refused(&map, size_of(&map));
    }
    for (map.trie_bytes = 4; map.trie_bytes < sizeof map.trie; map.trie_bytes += 512)
        if (CHECK_STATUS(open_model(&map, size_of(&map), 1, &t), ML_OK)) use(t);
}

TEST(text, charsmap_out_of_range) {
    charsmap map;
    ml_tokenizer *t;
    make_charsmap(&map);
    map.trie[0] = UINT32_MAX; /* the largest offset */
    REQUIRE(open_model(&map, size_of(&map), 1, &t) == ML_OK);
    check_text(t, "abcd", "abcd");
    ml_tokenizer_close(t);
    make_charsmap(&map);
    uint32_t *a = &map.trie[256 + 'a'];
    map.trie[(256 + 'a') ^ *a >> 10] =
        1u << 31 | ((uint32_t)map.text_bytes + 1); /* behind the texts */
    REQUIRE(open_model(&map, size_of(&map), 1, &t) == ML_OK);
    check_text(t, "a ab", "a y");
    ml_tokenizer_close(t);
    *a |= ~0x3FFu; /* its offset */
    REQUIRE(open_model(&map, size_of(&map), 1, &t) == ML_OK);
    check_text(t, "ab", "ab");
    ml_tokenizer_close(t);
    uint64_t seed = 5;
    for (int i = 0; i < 300; i++) {
        make_charsmap(&map);
        for (size_t u = 0; u < UNITS; u++) /* leaves and inner units */
            if ((map.trie[u] || u == 0) && test_range(&seed, 0, 3) == 0)
                map.trie[u] ^= (uint32_t)1 << test_range(&seed, 0, 31);
        for (size_t k = 0; k < map.text_bytes; k++)
            if (test_range(&seed, 0, 3) == 0) map.texts[k] = (char)test_range(&seed, 0, 255);
        if (CHECK_STATUS(open_model(&map, size_of(&map), 1 + i % 2, &t), ML_OK)) use(t);
    }
}
