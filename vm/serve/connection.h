/* The library's side of an HTTP server: its callbacks, with the server as their context. */
#ifndef SERVE_CONNECTION_H
#define SERVE_CONNECTION_H

#include "vm/serve/request.h"

enum MHD_Result http_answer(void *server, struct MHD_Connection *connection, const char *url,
                            const char *method, const char *version, const char *upload,
                            size_t *upload_size, void **state);
void http_completed(void *server, struct MHD_Connection *connection, void **state,
                    enum MHD_RequestTerminationCode code);

#endif
