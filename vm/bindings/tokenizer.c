/* Tokenizers in Lua. stdlib/tokenizer.lua checks arguments and is what scripts see. */
#include "vm/vm.h"

#include <string.h>

#include "runtime/text/tokenizer.h"

static const char *const TOKENIZER = "mlua.tokenizer", *const DECODER = "mlua.decoder",
                         *const IDS = "mlua.ids", *const BYTES = "mlua.bytes";

typedef struct {
    ml_tokenizer *tokenizer;
    ml_encoder *encoder;
    ml_ids ids; /* of the last text */
} boxed_tokenizer;

typedef struct {
    ml_decoder *decoder;
    ml_bytes text;
} boxed_decoder;

static boxed_tokenizer *check_tokenizer(lua_State *L) {
    return luaL_checkudata(L, 1, TOKENIZER);
}

static int tokenizer_gc(lua_State *L) {
    boxed_tokenizer *box = check_tokenizer(L);
    ml_encoder_close(box->encoder);
    ml_tokenizer_close(box->tokenizer);
    ml_ids_free(&box->ids);
    *box = (boxed_tokenizer){0};
    return 0;
}

static int decoder_gc(lua_State *L) {
    boxed_decoder *box = luaL_checkudata(L, 1, DECODER);
    ml_decoder_close(box->decoder);
    ml_bytes_free(&box->text);
    box->decoder = NULL;
    return 0;
}

static int ids_gc(lua_State *L) {
    ml_ids_free(luaL_checkudata(L, 1, IDS));
    return 0;
}

static int bytes_gc(lua_State *L) {
    ml_bytes_free(luaL_checkudata(L, 1, BYTES));
    return 0;
}

/* A zeroed box that is freed with the Lua state. */
static void *box_of(lua_State *L, size_t bytes, const char *class_name) {
    void *box = lua_newuserdatauv(L, bytes, 1);
    memset(box, 0, bytes);
    luaL_setmetatable(L, class_name);
    return box;
}

static int core_tokenizer(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    boxed_tokenizer *box = box_of(L, sizeof *box, TOKENIZER);
    vm_check(L, ml_tokenizer_open(path, &box->tokenizer));
    vm_check(L, ml_encoder_open(box->tokenizer, &box->encoder));
    return 1;
}

/* Into box->ids, whose memory stays for the next text unless it is much. */
static boxed_tokenizer *encode(lua_State *L) {
    enum { MOST = 1 << 20 };
    boxed_tokenizer *box = check_tokenizer(L);
    size_t bytes;
    const char *text = luaL_checklstring(L, 2, &bytes);
    int flags =
        (lua_toboolean(L, 3) ? ML_ENCODE_FRAME : 0) | (lua_toboolean(L, 4) ? ML_ENCODE_PLAIN : 0);
    if (box->ids.capacity > MOST) ml_ids_free(&box->ids);
    box->ids.count = 0;
    vm_check(L, ml_encoder_encode(box->encoder, text, bytes, flags, &box->ids));
    return box;
}

static int tokenizer_encode(lua_State *L) {
    const ml_ids *ids = &encode(L)->ids;
    lua_createtable(L, (int)ids->count, 0);
    for (int64_t i = 0; i < ids->count; i++) {
        lua_pushinteger(L, ids->at[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int tokenizer_count(lua_State *L) {
    lua_pushinteger(L, encode(L)->ids.count);
    return 1;
}

static int tokenizer_decode(lua_State *L) {
    boxed_tokenizer *box = check_tokenizer(L);
    luaL_checktype(L, 2, LUA_TTABLE);
    ml_ids *ids = box_of(L, sizeof *ids, IDS);
    ml_bytes *text = box_of(L, sizeof *text, BYTES);
    int64_t count = (int64_t)lua_rawlen(L, 2);
    vm_check(L, ml_ids_reserve(ids, count));
    for (int64_t i = 0; i < count; i++) {
        lua_rawgeti(L, 2, i + 1);
        ids->at[ids->count++] = (uint32_t)lua_tointeger(L, -1);
        lua_pop(L, 1);
    }
    vm_check(L, ml_tokenizer_decode(box->tokenizer, ids->at, ids->count,
                                    lua_toboolean(L, 3) ? ML_DECODE_SKIP_SPECIAL : 0, text));
    lua_pushlstring(L, text->at ? text->at : "", text->count);
    return 1;
}

static int tokenizer_stream(lua_State *L) {
    boxed_tokenizer *box = check_tokenizer(L);
    boxed_decoder *decoder = box_of(L, sizeof *decoder, DECODER);
    lua_pushvalue(L, 1); /* the tokenizer lives as long as the decoder */
    lua_setiuservalue(L, -2, 1);
    vm_check(L, ml_decoder_open(box->tokenizer, lua_toboolean(L, 2) ? ML_DECODE_SKIP_SPECIAL : 0,
                                &decoder->decoder));
    return 1;
}

static int decoder_add(lua_State *L) {
    boxed_decoder *box = luaL_checkudata(L, 1, DECODER);
    box->text.count = 0;
    if (lua_isnoneornil(L, 2))
        vm_check(L, ml_decoder_end(box->decoder, &box->text));
    else
        vm_check(L, ml_decoder_add(box->decoder, (uint32_t)luaL_checkinteger(L, 2), &box->text));
    lua_pushlstring(L, box->text.at ? box->text.at : "", box->text.count);
    return 1;
}

static void push_id(lua_State *L, int64_t id) {
    if (id < 0)
        lua_pushnil(L);
    else
        lua_pushinteger(L, id);
}

static int tokenizer_id(lua_State *L) {
    push_id(L, ml_tokenizer_id(check_tokenizer(L)->tokenizer, luaL_checkstring(L, 2)));
    return 1;
}

static int tokenizer_token(lua_State *L) {
    size_t bytes;
    const char *token =
        ml_tokenizer_token(check_tokenizer(L)->tokenizer, luaL_checkinteger(L, 2), &bytes);
    if (token)
        lua_pushlstring(L, token, bytes);
    else
        lua_pushnil(L);
    return 1;
}

static int tokenizer_facts(lua_State *L) {
    const ml_tokenizer *t = check_tokenizer(L)->tokenizer;
    lua_pushstring(L, ml_tokenizer_name(t));
    lua_pushinteger(L, ml_tokenizer_vocab(t));
    push_id(L, ml_tokenizer_bos(t));
    push_id(L, ml_tokenizer_eos(t));
    return 4;
}

static const vm_entry functions[] = {
    {"tokenizer", core_tokenizer, "path: string -> userdata",
     "a tokenizer: tokenizer.json, .tiktoken, or a folder that holds one; \"bytes\""},
    {0}};
static const vm_entry methods[] = {
    {"encode", tokenizer_encode, "text: string, frame: boolean, plain: boolean -> integer[]",
     "the ids of a text; with the tokens that the tokenizer adds around it; special tokens that it "
     "spells as ordinary text"},
    {"count", tokenizer_count, "text: string, frame: boolean, plain: boolean -> integer",
     "how many ids that are"},
    {"decode", tokenizer_decode, "ids: integer[], skip_special: boolean -> string", "their text"},
    {"stream", tokenizer_stream, "skip_special: boolean -> userdata",
     "a decoder of ids one by one: its method add(id) gives the characters that are whole, "
     "add() the rest"},
    {"id", tokenizer_id, "token: string -> integer?", "the id of a token by its text"},
    {"token", tokenizer_token, "id: integer -> string?", "the text of a token"},
    {"facts", tokenizer_facts, "-> string, integer, integer?, integer?",
     "the file's name, how many ids there are, the ids that begin and end a text"},
    {0}};
static const vm_entry decoder_methods[] = {
    {"add", decoder_add, "id?: integer -> string", "the next characters"}, {0}};

void vm_tokenizer_register(lua_State *L) {
    vm_register(L, functions);
    static const luaL_Reg collected[] = {{"mlua.ids", ids_gc}, {"mlua.bytes", bytes_gc}};
    vm_new_class(L, TOKENIZER, methods, NULL, tokenizer_gc);
    vm_new_class(L, DECODER, decoder_methods, NULL, decoder_gc);
    lua_pop(L, 2);
    for (int i = 0; i < 2; i++) {
        luaL_newmetatable(L, collected[i].name);
        vm_set_function(L, "__gc", collected[i].func);
        lua_pop(L, 1);
    }
}
