/* What `mlua show` reads in C (stdlib/show.lua says what is made of it): metrics.jsonl, manifests
 * and hashes of checkpoints, headers of safetensors files. */
#ifndef ML_SHOW_H
#define ML_SHOW_H

#include <jansson.h>

#include "runtime/base/status.h"

/* metrics.jsonl -> progress, series, events, last, evaluation, torn (the last line is not whole) of
 * a run.
 *
 * A curve has step and value, equally long; of more than SHOW_POINTS steps it has as many bins:
 * each has its first step, the mean, and low and high. What is not finite is null. */
enum { SHOW_POINTS = 2000 };
ml_status show_read_metrics(const char *path, json_t *run);

#endif
