/* Who may connect: the address that a server listens on, tokens, and pages of other sites. */
#ifndef SERVE_GUARD_H
#define SERVE_GUARD_H

#include "runtime/base/status.h"

/* A socket that listens on host and port (0: any), and the port. *loopback: no other machine
 * reaches it. */
ml_status guard_listen(const char *host, int port, int *socket, int *bound, bool *loopback);

/* Whether the header "Authorization: Bearer TOKEN" (NULL: none) has this token, in a time that does
 * not depend on where they differ. */
bool guard_token(const char *header, const char *token);

/* Without a token all programs of this machine are served, but not pages of other sites that a
 * browser on it shows: whether a Host header ("localhost:8000") or an Origin header
 * ("http://localhost:3000") names this machine. NULL, no header, does. */
bool guard_is_local(const char *header);

#endif
