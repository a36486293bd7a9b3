/* Products of operands of 8 bits (`--dtype fp8`). */
#ifndef ML_SCALE_PRODUCTS_H
#define ML_SCALE_PRODUCTS_H

#include "runtime/graph/graph.h"

/* Products that carry ML_NODE_FP8 as scaled products of operands of 8 bits (scale_products.c). On
 * the global graph, with its gradients. */
ml_graph *ml_scale_products(const ml_graph *from, ml_roots *roots);
bool ml_scale_products_applies(const ml_graph *g); /* whether there is one */
/* Scaled products where served() says that no library computes them, as products of bf16. */
typedef bool ml_scaled_product_served(const void *context, const ml_graph *g, ml_ref n);
ml_graph *ml_widen_scaled_products(const ml_graph *from, ml_roots *roots,
                                   ml_scaled_product_served *served, const void *context);
bool ml_widen_scaled_products_applies(const ml_graph *g); /* whether there is a scaled product */

#endif
