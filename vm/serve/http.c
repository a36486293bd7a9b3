#define _GNU_SOURCE /* POLLRDHUP */
#include "vm/serve/http.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/memory.h"
#include "vm/serve/connection.h"
#include "vm/serve/guard.h"

static ml_status no_memory(void) {
    return ml_fail(ML_NO_MEMORY, "not enough host memory for the server");
}

static char *copy_text(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = ml_alloc(size);
    return copy ? memcpy(copy, text, size) : NULL;
}

/* ---- Requests ---------------------------------------------------------------------------------*/

static http_request *pop(http_queue *queue) {
    http_request *r = queue->first;
    if (r) http_remove(queue, r);
    return r;
}

/* A request whose event the program has; NULL where it has ended or never was. */
static http_request *find(http_server *s, int64_t id) {
    http_request *r = id > 0 ? s->places[id % s->place_count] : NULL;
    return r && r->id == id && r->given ? r : NULL;
}

/* The program's part of the answer is over. */
static void let_go(http_request *r) {
    r->given = false;
    if (r->connection) {
        http_resume(r);
    } else {
        http_remove(&r->server->left, r);
        http_release(r);
    }
}

/* What has begun as a stream can become no other answer: the connection is closed. */
static bool is_cut_off(http_request *r) {
    if (r->stage == HTTP_STREAMING) r->left = true;
    return r->stage == HTTP_STREAMING;
}

/* ---- Answers ----------------------------------------------------------------------------------*/

ml_status http_reply(http_server *s, int64_t id, int status, const char *type, const char *text,
                     size_t size) {
    pthread_mutex_lock(&s->lock);
    http_request *r = find(s, id);
    bool done = !r || is_cut_off(r) || http_set_reply(r, status, type, text, size);
    if (r) let_go(r);
    pthread_mutex_unlock(&s->lock);
    return done ? ML_OK : no_memory();
}

ml_status http_refuse(http_server *s, int64_t id, int status, const char *message,
                      const char *parameter, const char *code) {
    pthread_mutex_lock(&s->lock);
    http_request *r = find(s, id);
    bool done = !r || is_cut_off(r) || http_set_error(r, status, message, parameter, code);
    if (r) let_go(r);
    pthread_mutex_unlock(&s->lock);
    return done ? ML_OK : no_memory();
}

ml_status http_chunk(http_server *s, int64_t id, const char *text, size_t size) {
    bool done = true;
    pthread_mutex_lock(&s->lock);
    http_request *r = find(s, id);
    if (r && r->connection) {
        if (r->stage == HTTP_WAITING)
            r->stage = HTTP_STREAMING, r->status = 200,
            r->type = "text/event-stream; charset=utf-8";
        done = http_append(&r->out, text, size);
        http_resume(r);
    }
    pthread_mutex_unlock(&s->lock);
    return done ? ML_OK : no_memory();
}

void http_finish(http_server *s, int64_t id) {
    pthread_mutex_lock(&s->lock);
    http_request *r = find(s, id);
    if (r) {
        r->ended = true;
        let_go(r);
    }
    pthread_mutex_unlock(&s->lock);
}

/* ---- Events -----------------------------------------------------------------------------------*/

enum { WATCH = POLLRDHUP | POLLHUP | POLLERR };

/* The library does not look after suspended connections: those whose clients closed them are
 * resumed, and it ends them. */
static void look_after_clients(http_server *s) {
    double time = ml_clock_now();
    int count = 0;
    if (time - s->looked < 0.02) return;
    s->looked = time;
    for (int i = 0; i < s->place_count; i++) {
        http_request *r = s->places[i];
        if (!r || !r->suspended || r->left) continue;
        s->watched[count] = r;
        s->sockets[count++] = (struct pollfd){.fd = r->socket, .events = POLLRDHUP};
    }
    if (count == 0 || poll(s->sockets, (nfds_t)count, 0) <= 0) return;
    for (int i = 0; i < count; i++) {
        if (!(s->sockets[i].revents & WATCH)) continue;
        s->watched[i]->left = true;
        http_resume(s->watched[i]);
    }
}

void http_wait(http_server *s, double seconds) {
    const struct timespec until = ml_clock_timespec(ml_clock_now() + seconds);
    pthread_mutex_lock(&s->lock);
    int status = 0;
    while (seconds > 0 && status == 0 && !s->arrived.first && !s->left.first)
        status = pthread_cond_timedwait(&s->changed, &s->lock, &until);
    look_after_clients(s);
    pthread_mutex_unlock(&s->lock);
}

bool http_next(http_server *s, http_event *event) {
    pthread_mutex_lock(&s->lock);
    http_request *left = pop(&s->left), *r = left ? left : pop(&s->arrived);
    if (r) *event = (http_event){r->id, left != NULL, r->path->path, left ? NULL : r->value};
    if (left) {
        http_release(left);
    } else if (r) {
        r->value = NULL; /* the caller's */
        ml_free(r->body.at);
        r->body = (http_bytes){0};
        r->arrived = false, r->given = true;
    }
    pthread_mutex_unlock(&s->lock);
    return r != NULL;
}

/* ---- Paths ------------------------------------------------------------------------------------*/

static void free_path(http_path *p) {
    if (!p) return;
    ml_free(p->method);
    ml_free(p->path);
    ml_free(p->type);
    ml_free(p->text.at);
    ml_free(p);
}

static http_path *new_path(const char *method, const char *path) {
    http_path *p = ml_alloc(sizeof *p);
    if (!p) return NULL;
    p->method = copy_text(method);
    p->path = copy_text(path);
    if (p->method && p->path) return p;
    free_path(p);
    return NULL;
}

static http_path *find_page(http_server *s, const char *path) {
    for (http_path *p = s->paths; p; p = p->next)
        if (p->is_page && strcmp(p->path, path) == 0) return p;
    return NULL;
}

static void add_path(http_server *s, http_path *p) {
    p->next = s->paths;
    s->paths = p;
}

/* The type of a page stays what it was first: answers that are being sent refer to it. */
ml_status http_page(http_server *s, const char *path, int status, const char *type,
                    const char *text, size_t size, bool open) {
    pthread_mutex_lock(&s->lock);
    http_path *p = find_page(s, path);
    bool is_new = !p;
    if (!p) p = new_path("GET", path);
    if (p && !p->type) p->type = copy_text(type);
    bool done = p && p->type;
    if (done) {
        p->is_page = true, p->open = open, p->status = status;
        p->text.size = 0;
        done = http_append(&p->text, text, size);
    }
    if (is_new && done) add_path(s, p);
    if (is_new && !done) free_path(p);
    pthread_mutex_unlock(&s->lock);
    return done ? ML_OK : no_memory();
}

ml_status http_route(http_server *s, const char *method, const char *path) {
    http_path *p = new_path(method, path);
    if (!p) return no_memory();
    pthread_mutex_lock(&s->lock);
    add_path(s, p);
    pthread_mutex_unlock(&s->lock);
    return ML_OK;
}

/* ---- Beginning and end ------------------------------------------------------------------------*/

int http_port(const http_server *s) {
    return s->port;
}

static void free_server(http_server *s) {
    for (http_path *p = s->paths, *next; p; p = next) {
        next = p->next;
        free_path(p);
    }
    for (int i = 0; s->places && i < s->place_count; i++)
        if (s->places[i]) http_release(s->places[i]);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    ml_free(s->places);
    ml_free(s->sockets);
    ml_free(s->watched);
    ml_free(s->token);
    ml_free(s);
}

static http_server *new_server(const http_options *options) {
    http_server *s = ml_alloc(sizeof *s);
    if (!s) return NULL;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&s->lock, NULL);
    s->most_body = options->most_body, s->most_waiting = options->most_waiting;
    s->place_count = 2 * options->most_connections; /* some wait for http_next after their end */
    s->places = ml_alloc(sizeof *s->places * (size_t)s->place_count);
    s->sockets = ml_alloc(sizeof *s->sockets * (size_t)s->place_count);
    s->watched = ml_alloc(sizeof *s->watched * (size_t)s->place_count);
    s->token = options->token ? copy_text(options->token) : NULL;
    if (s->places && s->sockets && s->watched && !s->token == !options->token) return s;
    free_server(s);
    return NULL;
}

static ml_status start_daemon(http_server *s, const http_options *options, int listener) {
    unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_ALLOW_SUSPEND_RESUME;
    s->daemon = s->library->start_daemon(
        flags, 0, NULL, NULL, http_answer, s, MHD_OPTION_LISTEN_SOCKET, listener,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)options->most_connections,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)options->idle_seconds, MHD_OPTION_NOTIFY_COMPLETED,
        http_completed, s, MHD_OPTION_END);
    if (s->daemon) return ML_OK;
    close(listener);
    return ml_fail(ML_IO, "libmicrohttpd could not start: no thread, or too few descriptors");
}

static ml_status listen_and_start(http_server *s, const http_options *options) {
    int listener;
    bool loopback;
    const char *host = options->host;
    ML_TRY(guard_listen(host, options->port, &listener, &s->port, &loopback));
    if (loopback || s->token) return start_daemon(s, options, listener);
    close(listener);
    ml_fail(ML_INVALID, "other machines reach %s, and all of them may use a server without a token",
            host);
    return ml_help(
        "--token-file FILE, a file with the token that clients send; or --host 127.0.0.1");
}

ml_status http_start(const http_options *options, http_server **server) {
    const http_library *library;
    *server = NULL;
    ML_TRY(http_library_open(&library));
    http_server *s = new_server(options);
    if (!s) return no_memory();
    s->library = library;
    ml_status status = listen_and_start(s, options);
    if (status != ML_OK) return free_server(s), status;
    *server = s;
    return ML_OK;
}

void http_drain(http_server *s) {
    pthread_mutex_lock(&s->lock);
    bool already = s->draining;
    s->draining = true;
    pthread_mutex_unlock(&s->lock);
    int listener = already ? -1 : s->library->quiesce_daemon(s->daemon);
    if (listener >= 0) close(listener);
}

bool http_sending(http_server *s) {
    pthread_mutex_lock(&s->lock);
    bool sending = s->live > 0;
    pthread_mutex_unlock(&s->lock);
    return sending;
}

void http_stop(http_server *s) {
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    for (int i = 0; i < s->place_count; i++)
        if (s->places[i]) http_resume(s->places[i]);
    pthread_mutex_unlock(&s->lock);
    s->library->stop_daemon(s->daemon);
    free_server(s);
}
