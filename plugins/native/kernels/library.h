/* What the library is made of: one table of functions for each level (kind of processor). */
#ifndef MOTLEY_LIBRARY_H
#define MOTLEY_LIBRARY_H
#include "adapted.h"
#include "attention.h"
#include "choosing.h"
#include "codes.h"
#include "matmul.h"
#include "mixture.h"
#include "recurrent.h"
#include "rows.h"
#include "sampling.h"

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

struct kernels {
    int32_t lanes;
    void (*quantise)(const struct plan *plan, int64_t token);
    void (*multiply)(const struct plan *plan, int64_t row, int64_t end);
    void (*normalise)(const struct norm *norm);
    void (*normalise_heads)(const struct head_norms *norms);
    void (*gate)(const struct gated *gated);
    void (*gate_streams)(const struct stream_gates *gates);
    void (*read_streams)(const struct streams *streams);
    void (*write_streams)(const struct streams *streams);
    void (*mix)(const struct weighing *w);
    void (*adapt_down)(const struct adapted_piece *piece);
    void (*adapt_up)(const struct adapted_piece *piece);
    void (*cache_rows)(const struct attention *a, const struct span *span, const struct table *table, float *scratch);
    void (*turn_queries)(const struct piece *now);
    void (*attend)(const struct piece *now, int64_t stretch, int64_t kv_head);
    void (*combine)(const struct piece *now, int64_t chunk);
    void (*cache_index)(const struct choice *c, const struct span *span, const struct table *table, float *scratch);
    void (*turn_index)(const struct choosing *now);
    void (*score_index)(const struct choosing *now, int64_t stretch);
    void (*encode)(const struct encoding *e);
    int64_t (*contend)(const struct draw *draw);
    void (*add_masses)(const struct masses *masses);
    void (*recur_delta)(const struct recurring *now, int64_t head);
    void (*recur_state_space)(const struct recurring *now, int64_t head);
    void (*recur_convolution)(const struct recurring *now, int64_t job);
    void (*recur_dilated)(const struct recurring *now, int64_t job);
};

/* Of recurrent.c, of a row of a span under way, rows before it having numbers below 0: what is kept of one that is not
 * of the span; what `first` has of one that is; what is convolved from a column on (of a short convolution's own rows, one
 * of two factors); and its gates. */
const float *recurrent_kept(const struct recurring *now, int64_t row);
const float *recurrent_first(const struct recurring *now, int64_t row);
const float *recurrent_columns(const struct recurring *now, int64_t row, int64_t column);
const float *recurrent_gates(const struct recurring *now, int64_t row);

EXPORT void motley_matmul(const struct matmul *m); /* declared here for who multiplies beside something else */

extern const struct kernels portable;
#ifdef __x86_64__
extern const struct kernels avx2, avx_vnni, avx512_vnni;
#endif

extern const struct kernels *kernels; /* of the level in use */
#endif
