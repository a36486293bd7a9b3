#include "vm/serve/request.h"

#include <string.h>

#include "runtime/base/memory.h"

bool http_append(http_bytes *b, const char *text, size_t size) {
    if (b->size + size > b->room) {
        size_t room = b->room * 2 > b->size + size ? b->room * 2 : b->size + size;
        char *at = ml_realloc(b->at, b->room, room);
        if (!at) return false;
        b->at = at, b->room = room;
    }
    if (size) memcpy(b->at + b->size, text, size);
    b->size += size;
    return true;
}

void http_push(http_queue *queue, http_request *r) {
    r->next = NULL;
    *(queue->last ? &queue->last->next : &queue->first) = r;
    queue->last = r;
}

void http_remove(http_queue *queue, http_request *r) {
    http_request *before = NULL;
    for (http_request *q = queue->first; q && q != r; q = q->next) before = q;
    *(before ? &before->next : &queue->first) = r->next;
    if (queue->last == r) queue->last = before;
}

void http_release(http_request *r) {
    http_server *s = r->server;
    s->waiting_bytes -= r->charged;
    s->places[r->id % s->place_count] = NULL;
    s->live--;
    json_decref(r->value);
    ml_free(r->body.at);
    ml_free(r->out.at);
    ml_free(r);
}

void http_resume(http_request *r) {
    if (!r->suspended) return;
    r->suspended = false;
    r->server->library->resume_connection(r->connection);
}

bool http_set_reply(http_request *r, int status, const char *type, const char *text, size_t size) {
    r->stage = HTTP_REPLIED;
    r->status = status;
    r->type = type;
    return http_append(&r->out, text, size);
}

static const char *error_kind(int status) {
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 429: return "rate_limit_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

bool http_set_error(http_request *r, int status, const char *message, const char *parameter,
                    const char *code) {
    json_t *value = json_pack("{s:{s:s,s:s,s:s?,s:s?}}", "error", "message", message, "type",
                              error_kind(status), "param", parameter, "code", code);
    size_t size = value ? json_dumpb(value, NULL, 0, JSON_COMPACT) : 0;
    char *text = ml_alloc(size + 1);
    if (text && value) json_dumpb(value, text, size, JSON_COMPACT);
    bool done = text && http_set_reply(r, status, "application/json", text, size);
    if (!done) http_set_reply(r, 500, "application/json", "", 0);
    ml_free(text);
    json_decref(value);
    return done;
}
