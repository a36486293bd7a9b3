#include "vm/serve/connection.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/base/memory.h"
#include "vm/serve/guard.h"

enum { STREAM_BLOCK = 16384, DISCARDED = 1 << 20 /* bytes that are read behind a limit */ };

/* ---- The beginning ----------------------------------------------------------------------------*/

static http_request **free_place(http_server *s) {
    for (int i = 0; i < s->place_count; i++) {
        int64_t id = ++s->serial;
        if (!s->places[id % s->place_count]) return &s->places[id % s->place_count];
    }
    return NULL;
}

static http_request *new_request(http_server *s, struct MHD_Connection *connection) {
    http_request **place = s->stopping ? NULL : free_place(s);
    http_request *r = place ? ml_alloc(sizeof *r) : NULL;
    if (!r) return NULL;
    *r = (http_request){.server = s, .id = s->serial, .connection = connection};
    const union MHD_ConnectionInfo *info =
        s->library->get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    r->socket = info ? info->connect_fd : -1;
    s->live++;
    return *place = r;
}

static const char *header(const http_request *r, const char *name) {
    return r->server->library->lookup_connection_value(r->connection, MHD_HEADER_KIND, name);
}

static void check_client(http_request *r) {
    const http_server *s = r->server;
    if (r->path && r->path->open) return;
    if (s->token && !guard_token(header(r, "Authorization"), s->token))
        http_set_error(
            r, 401, "the header Authorization: Bearer TOKEN has another token than this server's",
            NULL, "invalid_api_key");
    if (!s->token && !(guard_is_local(header(r, "Host")) && guard_is_local(header(r, "Origin"))))
        http_set_error(
            r, 403,
            "a server without a token answers to this machine alone: Host and Origin are localhost",
            NULL, NULL);
}

static bool find_path(http_request *r, const char *method, const char *url) {
    bool known = false;
    if (strcmp(method, "HEAD") == 0) method = "GET";
    for (const http_path *p = r->server->paths; p; p = p->next) {
        if (strcmp(p->path, url) != 0) continue;
        known = true;
        if (strcmp(p->method, method) == 0) r->path = p;
    }
    return known;
}

/* The program names its routes once it can serve them. */
static bool is_loading(const http_server *s) {
    for (const http_path *p = s->paths; p; p = p->next)
        if (!p->is_page) return false;
    return true;
}

/* Refuse what can be refused by its headers; its body is then read and discarded. */
static void check_headers(http_request *r, const char *method, const char *url) {
    const http_server *s = r->server;
    const char *length = header(r, "Content-Length");
    bool known = find_path(r, method, url);
    check_client(r);
    if (r->stage != HTTP_RECEIVING) return;
    if (!known && is_loading(s))
        http_set_error(r, 503, "the server loads its model: try again later", NULL, "loading");
    else if (!known)
        http_set_error(r, 404,
                       "there is no such path here: POST /v1/completions, POST "
                       "/v1/chat/completions, GET /v1/models, /health, /metrics",
                       NULL, "unknown_url");
    else if (!r->path)
        http_set_error(r, 405, "this path takes another method", NULL, "method_not_allowed");
    else if (s->draining && !r->path->is_page)
        http_set_error(r, 503, "the server is shutting down", NULL, "shutting_down");
    else if (length && strtoull(length, NULL, 10) > s->most_body)
        http_set_error(r, 413, "the body is longer than this server takes", NULL, "body_too_large");
}

/* ---- The body ---------------------------------------------------------------------------------*/

static bool receive(http_request *r, const char *bytes, size_t size) {
    http_server *s = r->server;
    r->charged += size, s->waiting_bytes += size;
    if (r->charged > s->most_body + DISCARDED) return false;
    if (r->stage != HTTP_RECEIVING) return true;
    if (r->charged > s->most_body)
        http_set_error(r, 413, "the body is longer than this server takes", NULL, "body_too_large");
    else if (s->waiting_bytes > s->most_waiting || !http_append(&r->body, bytes, size))
        http_set_error(r, 503, "the server has no room for more requests: try again later", NULL,
                       "overloaded");
    return true;
}

/* The value that the body holds. */
static void parse_body(http_request *r) {
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL;
    json_error_t problem;
    char message[256];
    r->value = json_loadb(r->body.at ? r->body.at : "", r->body.size, flags, &problem);
    if (!r->value && json_error_code(&problem) == json_error_numeric_overflow)
        r->value = json_loadb(r->body.at, r->body.size, flags | JSON_DECODE_INT_AS_REAL, &problem);
    if (json_is_object(r->value)) return;
    if (r->value)
        snprintf(message, sizeof message, "the body is not a JSON object");
    else
        snprintf(message, sizeof message, "the body is not valid JSON: %s (line %d, column %d)",
                 problem.text, problem.line, problem.column);
    http_set_error(r, 400, message, NULL, "invalid_json");
}

/* ---- The answer -------------------------------------------------------------------------------*/

static void suspend(http_request *r) {
    r->suspended = true;
    r->server->library->suspend_connection(r->connection);
}

/* The next bytes of a stream. Where there are none the connection waits for them. */
static ssize_t read_stream(void *context, uint64_t at, char *buffer, size_t room) {
    (void)at;
    http_request *r = context;
    ssize_t result = 0;
    pthread_mutex_lock(&r->server->lock);
    size_t count = r->out.size - r->sent;
    if (r->left || r->server->stopping) {
        result = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (count > 0) {
        result = (ssize_t)(count < room ? count : room);
        memcpy(buffer, r->out.at + r->sent, (size_t)result);
        r->sent += (size_t)result;
        if (r->sent == r->out.size) r->sent = r->out.size = 0;
    } else if (r->ended) {
        result = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        suspend(r);
    }
    pthread_mutex_unlock(&r->server->lock);
    return result;
}

static struct MHD_Response *make_response(http_request *r) {
    const http_library *l = r->server->library;
    if (r->stage == HTTP_STREAMING)
        return l->create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK, read_stream, r,
                                                NULL);
    return l->create_response_from_buffer(r->out.size, r->out.at ? r->out.at : "",
                                          MHD_RESPMEM_MUST_COPY);
}

static void add_headers(const http_request *r, struct MHD_Response *response) {
    const http_library *l = r->server->library;
    char name[32];
    snprintf(name, sizeof name, "req-%lld", (long long)r->id);
    l->add_response_header(response, "Content-Type", r->type);
    l->add_response_header(response, "x-request-id", name);
    if (r->stage == HTTP_STREAMING) l->add_response_header(response, "Cache-Control", "no-cache");
    if (r->status == 401) l->add_response_header(response, "WWW-Authenticate", "Bearer");
    if (r->status == 405) l->add_response_header(response, "Allow", "GET, POST");
    if (r->status == 429 || r->status == 503) l->add_response_header(response, "Retry-After", "1");
}

static enum MHD_Result send_response(http_request *r) {
    const http_library *l = r->server->library;
    struct MHD_Response *response = make_response(r);
    if (!response) return MHD_NO;
    add_headers(r, response);
    enum MHD_Result result = l->queue_response(r->connection, (unsigned)r->status, response);
    l->destroy_response(response);
    return result;
}

/* The request is whole: an answer that is known at once, or an event. */
static void settle(http_request *r) {
    http_server *s = r->server;
    const http_path *p = r->path;
    if (p->is_page) {
        http_set_reply(r, p->status, p->type, p->text.at, p->text.size);
        return;
    }
    if (strcmp(p->method, "POST") == 0) parse_body(r);
    if (r->stage != HTTP_RECEIVING) return;
    r->stage = HTTP_WAITING;
    r->arrived = true;
    http_push(&s->arrived, r);
    pthread_cond_signal(&s->changed);
    suspend(r);
}

static enum MHD_Result respond(http_request *r) {
    http_server *s = r->server;
    if (r->left || s->stopping) return MHD_NO;
    if (r->stage == HTTP_RECEIVING) settle(r);
    if (r->stage == HTTP_WAITING) return r->suspended ? MHD_YES : MHD_NO;
    return send_response(r);
}

static enum MHD_Result begin(http_server *s, struct MHD_Connection *connection, const char *url,
                             const char *method, void **state) {
    http_request *r = new_request(s, connection);
    if (!r) return MHD_NO;
    *state = r;
    check_headers(r, method, url);
    return r->status == 413 ? send_response(r) : MHD_YES; /* before it is sent */
}

enum MHD_Result http_answer(void *context, struct MHD_Connection *connection, const char *url,
                            const char *method, const char *version, const char *upload,
                            size_t *upload_size, void **state) {
    (void)version;
    http_server *s = context;
    http_request *r = *state;
    enum MHD_Result result;
    pthread_mutex_lock(&s->lock);
    if (!r)
        result = begin(s, connection, url, method, state);
    else if (*upload_size)
        result = receive(r, upload, *upload_size) ? MHD_YES : MHD_NO, *upload_size = 0;
    else
        result = respond(r);
    pthread_mutex_unlock(&s->lock);
    return result;
}

void http_completed(void *context, struct MHD_Connection *connection, void **state,
                    enum MHD_RequestTerminationCode code) {
    (void)connection, (void)code;
    http_server *s = context;
    http_request *r = *state;
    *state = NULL;
    if (!r) return;
    pthread_mutex_lock(&s->lock);
    r->connection = NULL;
    if (r->given) {
        http_push(&s->left, r);
        pthread_cond_signal(&s->changed);
    } else {
        if (r->arrived) http_remove(&s->arrived, r);
        http_release(r);
    }
    pthread_mutex_unlock(&s->lock);
}
