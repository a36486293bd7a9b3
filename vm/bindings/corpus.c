/* Corpora in Lua. */
#include "vm/vm.h"

#include <string.h>

#include "runtime/data/reader.h"
#include "runtime/data/writer.h"
#include "vm/embed.h"

/* A corpus, and what reads it ahead: for training, and for evaluation in between. */
enum { READERS = 2 };
typedef struct {
    ml_corpus *corpus;
    ml_reader *readers[READERS]; /* the one used last is first */
} vm_corpus;

static vm_corpus *check_box(lua_State *L) {
    return luaL_checkudata(L, 1, vm_corpus_class);
}

static ml_corpus *check_corpus(lua_State *L) {
    return check_box(L)->corpus;
}

static int corpus_gc(lua_State *L) {
    vm_corpus *box = check_box(L);
    for (int i = 0; i < READERS; i++) ml_reader_close(box->readers[i]);
    ml_corpus_close(box->corpus);
    *box = (vm_corpus){0};
    return 0;
}

/* The kind that the option dtype names. */
static ml_corpus_kind check_kind(lua_State *L) {
    if (!vm_option(L, 2, "dtype")) return ML_CORPUS_BY_NAME;
    const char *dtype = luaL_tolstring(L, -1, NULL);
    bool narrow = strcmp(dtype, "u8") == 0, wide = strcmp(dtype, "u32") == 0;
    if (!narrow && !wide && strcmp(dtype, "u16") != 0)
        vm_fail(L, "tokens are u8 (text, by bytes), u16 or u32", "a corpus cannot hold %s", dtype);
    lua_pop(L, 2);
    return narrow ? ML_CORPUS_BYTES : wide ? ML_CORPUS_U32 : ML_CORPUS_U16;
}

static int core_corpus(lua_State *L) {
    static const char *const known[] = {"dtype", "tokenizer", "made", NULL};
    ml_corpus_kind kind = ML_CORPUS_BY_NAME;
    ml_tokenizer *tokenizer = NULL;
    const char *path = lua_isnoneornil(L, 1) ? NULL : luaL_checkstring(L, 1), *name = NULL;
    bool made = false;
    lua_settop(L, 2);
    if (lua_istable(L, 2)) {
        vm_check_options(L, 2, "corpus", known);
        kind = check_kind(L);
        made = vm_option(L, 2, "made") && lua_toboolean(L, -1);
        if (vm_option(L, 2, "tokenizer")) name = luaL_checkstring(L, -1);
    }
    vm_corpus *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (vm_corpus){0};
    luaL_setmetatable(L, vm_corpus_class);
    if (name && path) vm_check(L, ml_tokenizer_open(name, &tokenizer));
    if (path) {
        vm_check(L, made ? ml_corpus_open_made(path, tokenizer, &box->corpus)
                         : ml_corpus_open(path, kind, tokenizer, &box->corpus));
        return 1;
    }
    const ml_embedded *text = embed_find("corpus.txt");
    if (name) vm_fail(L, "data=FILE", "a tokenizer needs text: name a file");
    if (!text)
        vm_fail(L, "name a file: data=FILE", "this program was built without its default text");
    vm_check(L, ml_corpus_from_memory("the default text", text->data, text->size, &box->corpus));
    return 1;
}

/* A share of the tokens. */
static double check_share(lua_State *L, const char *key, double share) {
    if (!vm_option(L, 5, key)) return share;
    share = lua_tonumber(L, -1);
    if (lua_type(L, -1) != LUA_TNUMBER || !(share >= 0 && share <= 1))
        vm_fail(L, "0 is the corpus's beginning, 1 its end", "%s must be a share between 0 and 1",
                key);
    lua_pop(L, 1);
    return share;
}

static int64_t option_integer(lua_State *L, const char *key, const char *what, int64_t value) {
    if (!vm_option(L, 5, key)) return value;
    value = vm_integer(L, -1, what);
    lua_pop(L, 1);
    return value;
}

/* What the options at index 5 say of batches of a host array. */
static ml_reader_plan check_plan(lua_State *L, const vm_host *host, int64_t step) {
    static const char *const known[] = {"seed",  "from",  "to",        "vocab",     "skip", "first",
                                        "count", "ahead", "documents", "positions", NULL};
    lua_settop(L, 5);
    if (lua_isnil(L, 5)) lua_newtable(L), lua_replace(L, 5);
    luaL_checktype(L, 5, LUA_TTABLE);
    vm_check_options(L, 5, "fill", known);
    int64_t rows = host->dims[0];
    ml_reader_plan plan = {
        .range = {.from = check_share(L, "from", 0), .to = check_share(L, "to", 1)},
        .rows = rows,
        .length = host->dims[1],
        .first = option_integer(L, "first", "the row", 0)};
    plan.range.seed = option_integer(L, "seed", "the seed", ml_session_seed(vm_of(L)->session));
    plan.range.vocab = option_integer(L, "vocab", "vocab", 0);
    plan.skip = option_integer(L, "skip", "the samples to skip", 0);
    plan.count = option_integer(L, "count", "the rows", rows - plan.first);
    if (plan.skip < 0 || (rows && plan.skip > INT64_MAX - (step + 8) * rows))
        vm_fail(L, NULL, "%lld samples cannot be skipped", (long long)plan.skip);
    if (plan.first < 0 || plan.count < 0 || plan.count > rows || plan.first > rows - plan.count)
        vm_fail(L, NULL, "there are no %lld rows from %lld of %lld", (long long)plan.count,
                (long long)plan.first, (long long)rows);
    return plan;
}

/* The reader of a plan, opened in the place of the one that was not used for longest. */
static ml_status find_reader(vm_corpus *box, const ml_reader_plan *plan, ml_reader **result) {
    int at = 0;
    while (at < READERS - 1 && box->readers[at] && !ml_reader_is(box->readers[at], plan)) at++;
    ml_reader *found = box->readers[at];
    if (found && !ml_reader_is(found, plan)) {
        ml_reader_close(found);
        box->readers[at] = found = NULL;
    }
    if (!found) ML_TRY(ml_reader_open(box->corpus, plan, &found));
    memmove(box->readers + 1, box->readers, (size_t)at * sizeof *box->readers);
    *result = box->readers[0] = found;
    return ML_OK;
}

static ml_status fill(vm_corpus *box, const ml_reader_plan *plan, bool ahead, int64_t step,
                      const ml_batch *batch) {
    if (plan->count == 0) return ML_OK;
    if (!ahead)
        return ml_corpus_fill(box->corpus, &plan->range,
                              plan->skip + step * plan->rows + plan->first, plan->count,
                              plan->length, plan->first, batch);
    ml_reader *reader;
    ML_TRY(find_reader(box, plan, &reader));
    return ml_reader_fill(reader, step, batch);
}

/* The host array at the top of the stack, of i32 and two dimensions: those of `like`. */
static vm_host *check_rows(lua_State *L, int at, const vm_host *like) {
    vm_host *host = vm_to_host(L, at);
    if (!host || host->dtype != ML_I32 || host->rank != 2)
        vm_fail(L, "m.host(\"i32\", batch, seq)", "a corpus fills two-dimensional i32 host arrays");
    if (like && memcmp(host->dims, like->dims, 2 * sizeof(int64_t)) != 0)
        vm_fail(L, NULL, "inputs and targets must have the same dimensions");
    return host;
}

/* The options documents and positions: both or neither. */
static void check_documents(lua_State *L, const ml_corpus *corpus, const vm_host *like,
                            ml_batch *batch) {
    if (!vm_option(L, 5, "documents")) return;
    batch->documents = check_rows(L, -1, like)->data;
    if (!vm_option(L, 5, "positions")) vm_fail(L, NULL, "documents need positions, too");
    batch->positions = check_rows(L, -1, like)->data;
    const char *unmarked = ml_corpus_unmarked(corpus);
    if (unmarked)
        vm_fail(L,
                "tokenizer= names the one whose eos ends documents; Megatron's .idx, .jsonl and "
                "llm.c's files have them; pack=\"concat\" does without",
                "where documents begin in %s is not known", unmarked);
    lua_pop(L, 2);
}

static int corpus_fill(lua_State *L) {
    vm_corpus *box = check_box(L);
    vm_host *inputs = check_rows(L, 2, NULL), *targets = check_rows(L, 3, inputs);
    ml_batch batch = {.inputs = inputs->data, .targets = targets->data};
    int64_t step = vm_integer(L, 4, "the step"), rows = inputs->dims[0];
    if (step < 0 || (rows && step > INT64_MAX / rows - 8))
        vm_fail(L, NULL, "there is no step %lld", (long long)step);
    ml_reader_plan plan = check_plan(L, inputs, step);
    check_documents(L, box->corpus, inputs, &batch);
    plan.documents = batch.documents != NULL;
    bool ahead = vm_option(L, 5, "ahead") && lua_toboolean(L, -1);
    double begin = vm_profile_clock(L);
    vm_check(L, fill(box, &plan, ahead, step, &batch));
    vm_profile_span(L, "data", begin);
    lua_settop(L, 1);
    return 1;
}

static int corpus_read(lua_State *L) {
    const ml_corpus *corpus = check_corpus(L);
    vm_host *host = vm_to_host(L, 2);
    if (!host || host->dtype != ML_I32)
        vm_fail(L, "m.host(\"i32\", 1024)", "a corpus is read into a host array of i32");
    int64_t first = vm_integer(L, 3, "the first token");
    double begin = vm_profile_clock(L);
    vm_check(L, ml_corpus_read(corpus, first, host->count, host->data));
    vm_profile_span(L, "data", begin);
    lua_settop(L, 2);
    return 1;
}

static int corpus_size(lua_State *L) {
    lua_pushinteger(L, ml_corpus_tokens(check_corpus(L)));
    return 1;
}

static int corpus_documents(lua_State *L) {
    lua_pushinteger(L, ml_corpus_documents(check_corpus(L)));
    return 1;
}

static int corpus_identity(lua_State *L) {
    ml_bytes text = {0};
    ml_status status = ml_corpus_identity(check_corpus(L), &text);
    if (status == ML_OK) lua_pushlstring(L, text.at, text.count); /* Lua's memory has no limit */
    ml_bytes_free(&text);
    vm_check(L, status);
    return 1;
}

static int corpus_name(lua_State *L) {
    lua_pushstring(L, ml_corpus_name(check_corpus(L)));
    return 1;
}

static void add_token(luaL_Buffer *b, bool bytes, lua_Integer id) {
    if (bytes) {
        luaL_addchar(b, (char)(id >= 0 && id < 256 ? id : '?'));
    } else {
        char text[32];
        snprintf(text, sizeof text, luaL_bufflen(b) ? " %lld" : "%lld", (long long)id);
        luaL_addstring(b, text);
    }
}

static int64_t id_at(lua_State *L, const vm_host *host, int64_t i) {
    if (host)
        vm_push_element(L, host->dtype, host->data, i);
    else
        lua_rawgeti(L, 2, i + 1);
    int64_t id = lua_tointeger(L, -1);
    lua_pop(L, 1);
    return id;
}

static int decode(lua_State *L, const ml_tokenizer *tokenizer, const vm_host *host, int64_t count) {
    ml_ids ids = {0};
    ml_bytes text = {0};
    ml_status status = ml_ids_reserve(&ids, count + 1);
    for (int64_t i = 0; i < count && status == ML_OK; i++) {
        int64_t id = id_at(L, host, i);
        ids.at[ids.count++] = id >= 0 && id < UINT32_MAX ? (uint32_t)id : UINT32_MAX;
    }
    if (status == ML_OK) status = ml_tokenizer_decode(tokenizer, ids.at, count, 0, &text);
    if (status == ML_OK) lua_pushlstring(L, text.at ? text.at : "", text.count);
    ml_ids_free(&ids);
    ml_bytes_free(&text);
    vm_check(L, status);
    return 1;
}

static int corpus_text(lua_State *L) {
    const ml_corpus *corpus = check_corpus(L);
    const vm_host *host = vm_to_host(L, 2);
    if (!host) luaL_checktype(L, 2, LUA_TTABLE);
    int64_t count = host ? host->count : vm_table_length(L, 2);
    if (ml_corpus_tokenizer(corpus)) return decode(L, ml_corpus_tokenizer(corpus), host, count);
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    bool bytes = ml_corpus_is_bytes(corpus);
    for (int64_t i = 0; i < count; i++) {
        add_token(&b, bytes, id_at(L, host, i));
    }
    luaL_pushresult(&b);
    return 1;
}

static int corpus_tostring(lua_State *L) {
    const ml_corpus *corpus = check_corpus(L);
    lua_pushfstring(L, "corpus of %I tokens from %s", (LUAI_UACINT)ml_corpus_tokens(corpus),
                    ml_corpus_name(corpus));
    return 1;
}

/* ---- Writing --------------------------------------------------------------------------------- */

/* Ids of a document: a list or an array of i32 on the host. */
static ml_status write_document(lua_State *L, int at, ml_writer *writer) {
    const vm_host *host = vm_to_host(L, at);
    int64_t count = host ? host->count : (int64_t)lua_rawlen(L, at);
    for (int64_t i = 0; i < count; i++) {
        if (host)
            vm_push_element(L, host->dtype, host->data, i);
        else
            lua_rawgeti(L, at, i + 1);
        int whole;
        lua_Integer id = lua_tointegerx(L, -1, &whole);
        lua_pop(L, 1);
        if (!whole || id < 0 || id > INT32_MAX)
            return ml_fail(ML_INVALID, "element %lld of a document is not a token id",
                           (long long)i + 1);
        ML_TRY(ml_writer_add(writer, &(uint32_t){(uint32_t)id}, 1));
    }
    return ml_writer_end_document(writer);
}

static ml_status write_documents(lua_State *L, ml_writer *writer) {
    int64_t count = (int64_t)lua_rawlen(L, 2);
    for (int64_t i = 1; i <= count; i++) {
        lua_rawgeti(L, 2, i);
        bool known = lua_istable(L, -1) || vm_to_host(L, -1);
        ml_status status =
            known ? write_document(L, lua_gettop(L), writer)
                  : ml_fail(ML_INVALID, "document %lld is not a list of token ids", (long long)i);
        lua_pop(L, 1);
        if (status != ML_OK) return status;
    }
    return ML_OK;
}

static int core_write_tokens(lua_State *L) {
    static const char *const known[] = {"format", "dtype", NULL};
    static const char *const formats[] = {"nanogpt", "llm.c", "megatron"};
    const char *path = luaL_checkstring(L, 1), *format = formats[0], *dtype = "u16";
    int kind = 0;
    ml_writer *writer;
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 3);
    if (!lua_isnil(L, 3)) {
        luaL_checktype(L, 3, LUA_TTABLE);
        vm_check_options(L, 3, "write_tokens", known);
        if (vm_option(L, 3, "format")) format = luaL_checkstring(L, -1);
        if (vm_option(L, 3, "dtype")) dtype = luaL_checkstring(L, -1);
    }
    while (kind < 3 && strcmp(format, formats[kind]) != 0) kind++;
    bool wide = strcmp(dtype, "u32") == 0;
    if (kind == 3) vm_fail(L, "nanogpt, llm.c or megatron", "no file of tokens is %s", format);
    if (!wide && strcmp(dtype, "u16") != 0)
        vm_fail(L, "u16 or u32", "tokens are not written as %s", dtype);
    vm_check(L, ml_writer_open(path, (ml_write_format)kind, wide ? 4 : 2, &writer));
    ml_status status = write_documents(L, writer);
    ml_error failed = *ml_error_last();
    ml_status closed = ml_writer_close(writer, status == ML_OK);
    if (status != ML_OK) *ml_error_last() = failed;
    vm_check(L, status != ML_OK ? status : closed);
    return 0;
}

static const vm_entry functions[] = {
    {"write_tokens", core_write_tokens,
     "path: string, documents: (Host|integer[])[], options?: {format: string, dtype: string}",
     "write documents of token ids to a .bin file: as nanoGPT has it (the default), llm.c with its "
     "header, or megatron with an .idx beside it; as u16 (the default) or u32 (Megatron: i32)"},
    {"corpus", core_corpus, "data?: string, options?: {dtype: string, tokenizer: string} -> Corpus",
     "data to train on: a file, folder or pattern of text (a token a byte, or a tokenizer's), "
     ".jsonl (either as .gz or .zst), .bin of tokens (u16, u32, llm.c's, Megatron's with its .idx) "
     "or .npy; several with weights: \"web/*.bin:0.7,code.bin:0.3\"; a dtype (u8, u16 or u32) "
     "takes any "
     "file as that; without data the text that is built in"},
    {0}};
static const vm_entry methods[] = {
    {"size", corpus_size, "-> integer", "the number of tokens"},
    {"documents", corpus_documents, "-> integer",
     "the number of documents, a file without marks being one"},
    {"identity", corpus_identity, "-> string",
     "what says whether other files give the same samples, as JSON: of each its name, tokens, "
     "bytes "
     "and the hash of some blocks"},
    {"name", corpus_name, "-> string", "what it was opened by"},
    {"fill", corpus_fill,
     "inputs: Host, targets: Host, step: integer, options?: {seed: integer, from: number, to: "
     "number, vocab: integer, skip: integer, first: integer, count: integer, ahead: boolean} -> "
     "Corpus",
     "draw the windows of a batch and the tokens that follow: samples skip + step * rows and on, "
     "the same for the same seed (default: that of all randomness, --seed), each epoch in an order "
     "of its own; from and to are shares of each source between 0 and 1; first (from 0) and count: "
     "only these rows; ahead: threads read the next steps meanwhile; documents and positions: host "
     "arrays of the number of each token's document in its row and of its place in that, "
     "from 0; documents' last targets are then -1"},
    {"read", corpus_read, "tokens: Host, first: integer -> Host",
     "fill a host array of i32 with the tokens from `first` on, counted from 0"},
    {"text", corpus_text, "ids: Host|integer[] -> string", "the text of token ids"},
    {0}};

void vm_corpus_register(lua_State *L) {
    vm_register(L, functions);
    vm_new_class(L, vm_corpus_class, methods, NULL, corpus_gc);
    lua_pop(L, 1);
    luaL_getmetatable(L, vm_corpus_class);
    vm_set_function(L, "__tostring", corpus_tostring);
    lua_pop(L, 1);
}
