/* Weights of other layouts into states: a state, or a box of it, as a strided view of a tensor of a
 * safetensors file.
 *
 * A view says where each element of the box lies in the tensor: at `offset` plus the sum of its
 * indices times `stride`, so that transposed, split and merged axes are numbers here. A rank reads
 * the byte ranges that its own part needs (and small gaps between them), pieces of them on several
 * threads (fill.h), and casts to the state's dtype: floats to floats. */
#ifndef ML_VIEW_LOAD_H
#define ML_VIEW_LOAD_H

#include "runtime/exec/program.h"
#include "runtime/io/safetensors.h"

typedef struct {
    uint32_t state;
    const ml_safetensors *file;
    const ml_safetensor *tensor;
    const ml_safetensors *scale_file; /* of an 8-bit tensor: the scales of its 128x128 blocks; */
    const ml_safetensor *scale;       /* NULL: none */
    int64_t offset;                   /* in elements of the tensor: of the box's first */
    int64_t stride[ML_MAX_AXES];      /* by axis of the state, in elements of the tensor */
    int64_t start[ML_MAX_AXES], count[ML_MAX_AXES]; /* the box, by axis of the state */
} ml_view;

/* Set states from views whose boxes fill them, those of a state one behind the other; on several
 * ranks all at once. ML_INVALID: a view does not fit the shape of its tensor. `from` is what
 * messages call the source. */
ml_status ml_session_load_views(ml_session *session, const ml_view *views, int count,
                                const char *from);

/* Elements of a tensor in host memory, one view of it from an array of whole extents `size`: the
 * other way around, for files that are written. Both of the same width in bytes. */
void ml_view_paste(const ml_view *view, int rank, const int64_t *size, int64_t width,
                   const void *from, void *tensor);

#endif
