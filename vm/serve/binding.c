/* core.http_server: HTTP for stdlib/serve.lua. */
#include "vm/vm.h"

#include "vm/serve/http.h"

static const char *const server_class = "mlua.http_server";

static http_server *to_server(lua_State *L) {
    http_server **box = luaL_checkudata(L, 1, server_class);
    if (!*box) vm_fail(L, NULL, "the server was stopped");
    return *box;
}

static int server_stop(lua_State *L) {
    http_server **box = luaL_checkudata(L, 1, server_class), *server = *box;
    *box = NULL;
    http_stop(server);
    return 0;
}

static lua_Integer integer_field(lua_State *L, const char *key) {
    if (!vm_option(L, 1, key)) vm_fail(L, NULL, "http_server needs %s", key);
    lua_Integer value = vm_integer(L, -1, key);
    lua_pop(L, 1);
    return value;
}

/* The text stays in the table of options. */
static const char *text_field(lua_State *L, const char *key) {
    if (!vm_option(L, 1, key)) return NULL;
    const char *text = luaL_checkstring(L, -1);
    lua_pop(L, 1);
    return text;
}

static int core_http_server(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    const http_options options = {.host = text_field(L, "host"),
                                  .port = (int)integer_field(L, "port"),
                                  .token = text_field(L, "token"),
                                  .most_body = (size_t)integer_field(L, "body"),
                                  .most_waiting = (size_t)integer_field(L, "waiting"),
                                  .most_connections = (int)integer_field(L, "connections"),
                                  .idle_seconds = (int)integer_field(L, "idle")};
    if (!options.host) vm_fail(L, NULL, "http_server needs host");
    http_server **box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = NULL;
    luaL_setmetatable(L, server_class);
    vm_check(L, http_start(&options, box));
    return 1;
}

static int server_port(lua_State *L) {
    lua_pushinteger(L, http_port(to_server(L)));
    return 1;
}

static int server_page(lua_State *L) {
    size_t size;
    const char *path = luaL_checkstring(L, 2), *type = luaL_checkstring(L, 4);
    const char *text = luaL_checklstring(L, 5, &size);
    vm_check(L, http_page(to_server(L), path, (int)luaL_checkinteger(L, 3), type, text, size,
                          lua_toboolean(L, 6)));
    return 0;
}

static int server_route(lua_State *L) {
    vm_check(L, http_route(to_server(L), luaL_checkstring(L, 2), luaL_checkstring(L, 3)));
    return 0;
}

static void push_event(lua_State *L, http_server *server) {
    http_event event;
    json_t **box = vm_push_json(L); /* before there is a value to own */
    if (!http_next(server, &event)) {
        lua_pop(L, 1);
        lua_pushnil(L);
        return;
    }
    *box = event.body;
    lua_createtable(L, 0, 4);
    vm_set_integer(L, "id", event.id);
    vm_set_string(L, "path", event.path);
    vm_set_boolean(L, "left", event.left);
    lua_insert(L, -2);
    if (event.body) {
        vm_open_json(L);
        lua_setfield(L, -2, "body");
    } else {
        lua_pop(L, 1);
    }
}

static int server_poll(lua_State *L) {
    http_server *server = to_server(L);
    http_wait(server, luaL_optnumber(L, 2, 0));
    lua_newtable(L);
    for (lua_Integer i = 1;; i++) {
        push_event(L, server);
        if (lua_isnil(L, -1)) break;
        lua_rawseti(L, -2, i);
    }
    lua_pop(L, 1);
    return 1;
}

static int server_reply(lua_State *L) {
    size_t size;
    static const char *const types[] = {"application/json", "text/plain; version=0.0.4", NULL};
    int type = luaL_checkoption(L, 4, NULL, types);
    const char *text = luaL_checklstring(L, 5, &size);
    vm_check(L, http_reply(to_server(L), luaL_checkinteger(L, 2), (int)luaL_checkinteger(L, 3),
                           types[type], text, size));
    return 0;
}

static int server_refuse(lua_State *L) {
    vm_check(L, http_refuse(to_server(L), luaL_checkinteger(L, 2), (int)luaL_checkinteger(L, 3),
                            luaL_checkstring(L, 4), luaL_optstring(L, 5, NULL),
                            luaL_optstring(L, 6, NULL)));
    return 0;
}

static int server_chunk(lua_State *L) {
    size_t size;
    const char *text = luaL_checklstring(L, 3, &size);
    vm_check(L, http_chunk(to_server(L), luaL_checkinteger(L, 2), text, size));
    return 0;
}

static int server_finish(lua_State *L) {
    http_finish(to_server(L), luaL_checkinteger(L, 2));
    return 0;
}

static int server_drain(lua_State *L) {
    http_drain(to_server(L));
    return 0;
}

static int server_sending(lua_State *L) {
    lua_pushboolean(L, http_sending(to_server(L)));
    return 1;
}

void vm_serve_register(lua_State *L) {
    static const vm_entry functions[] = {
        {"http_server", core_http_server, "options: table -> HttpServer",
         "listen: host, port (0: any), token (without one loopback alone), body and waiting (most "
         "bytes of one request, of all), connections, idle (seconds)"},
        {0}};
    static const vm_entry methods[] = {
        {"port", server_port, "-> integer", "the port that it listens on"},
        {"page", server_page,
         "path: string, status: integer, type: string, text: string, open?: boolean",
         "what every GET of a path gets from now on; open: without a token too"},
        {"route", server_route, "method: string, path: string",
         "requests that are events; others get 404 or 405"},
        {"poll", server_poll, "seconds?: number -> table[]",
         "events {id=, path=, body=, left=}: a request with its JSON, or a client that left; waits "
         "that long for the first"},
        {"reply", server_reply, "id: integer, status: integer, type: string, text: string",
         "the whole answer of a request"},
        {"refuse", server_refuse,
         "id: integer, status: integer, message: string, param?: string, code?: string",
         "answer with an error as OpenAI's API has it"},
        {"chunk", server_chunk, "id: integer, text: string",
         "a part of an answer that is sent as it is made"},
        {"finish", server_finish, "id: integer", "the end of such an answer"},
        {"drain", server_drain, "", "accept no more connections, refuse new requests"},
        {"sending", server_sending, "-> boolean", "whether an answer was not sent whole"},
        {"stop", server_stop, "", "close all connections"},
        {0}};
    vm_register(L, functions);
    vm_new_class(L, server_class, methods, NULL, server_stop);
    lua_pop(L, 1);
}
