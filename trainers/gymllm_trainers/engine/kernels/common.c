#include "common.h"

#include <pthread.h>
#include <sched.h>

// A line of the cache each: threads count in one while others look at the next.
typedef struct {
  _Alignas(64) atomic_int next;
  atomic_int finished;
  int units;
} Phase;

typedef struct {
  atomic_int users;
  atomic_bool lacked_memory;
  int phases;
  void (*work)(const void *, int, int);
  const void *arguments;
  Phase phase[];
} Job;

static void wait_a_little(int tries) {
  if (tries > 4000) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Whether the unit that this thread works on asked for memory in vain.
static _Thread_local bool lacked_memory;

static void take_units(Job *job) {
  lacked_memory = false;
  for (int number = 0; number < job->phases; number++) {
    Phase *phase = &job->phase[number];
    while (atomic_load_explicit(&phase->next, memory_order_relaxed) < phase->units) {
      const int unit = atomic_fetch_add(&phase->next, 1);
      if (unit >= phase->units) break;
      job->work(job->arguments, number, unit);
      if (lacked_memory) atomic_store(&job->lacked_memory, true);
      atomic_fetch_add(&phase->finished, 1);
    }
    for (int tries = 0; atomic_load(&phase->finished) < phase->units; tries++) wait_a_little(tries);
  }
}

static void leave(Job *job) {
  if (atomic_fetch_sub(&job->users, 1) == 1) free(job);
}

static void help(void *data) {
  take_units(data);
  leave(data);
}

XLA_FFI_Error *run_phases(XLA_FFI_CallFrame *frame, int threads, int phases, const int *units,
                          void (*work)(const void *, int, int), const void *arguments) {
  int widest = 0;
  for (int phase = 0; phase < phases; phase++) widest = units[phase] > widest ? units[phase] : widest;
  const int helpers = (threads < widest ? threads : widest) - 1;
  Job *job = helpers > 0 ? aligned_alloc(64, sizeof(Job) + phases * sizeof(Phase)) : NULL;
  if (!job) {
    lacked_memory = false;
    for (int phase = 0; phase < phases; phase++)
      for (int unit = 0; unit < units[phase]; unit++) work(arguments, phase, unit);
    return lacked_memory ? fail(frame, NO_MEMORY) : NULL;
  }
  *job = (Job){.users = helpers + 1, .phases = phases, .work = work, .arguments = arguments};
  for (int phase = 0; phase < phases; phase++) job->phase[phase] = (Phase){.units = units[phase]};
  for (int helper = 0; helper < helpers; helper++) {
    XLA_FFI_ThreadPool_Schedule_Args schedule = {.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
                                                 .ctx = frame->ctx,
                                                 .task = help,
                                                 .data = job};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&schedule);
    if (error) {
      XLA_FFI_Error_Destroy_Args destroy = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE,
                                            .error = error};
      frame->api->XLA_FFI_Error_Destroy(&destroy);
      leave(job);
    }
  }
  take_units(job);
  const bool failed = atomic_load(&job->lacked_memory);
  leave(job);
  return failed ? fail(frame, NO_MEMORY) : NULL;
}

typedef struct {
  void (*work)(const void *, int);
  const void *arguments;
} Single;

static void work_single(const void *data, int phase, int unit) {
  (void)phase;
  const Single *single = data;
  single->work(single->arguments, unit);
}

XLA_FFI_Error *run_parallel(XLA_FFI_CallFrame *frame, int threads, int units, void (*work)(const void *, int),
                            const void *arguments) {
  const Single single = {work, arguments};
  return run_phases(frame, threads, 1, &units, work_single, &single);
}

int count_threads(XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args arguments = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, .ctx = frame->ctx, .num_threads = &threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&arguments);
  if (error) {
    XLA_FFI_Error_Destroy_Args destroy = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = error};
    frame->api->XLA_FFI_Error_Destroy(&destroy);
    return 1;
  }
  return threads < 1 ? 1 : (int)threads;
}

typedef struct {
  void *memory;
  size_t held;
} Scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void free_scratch(void *data) {
  for (int kind = 0; kind < SCRATCHES; kind++) free(((Scratch *)data)[kind].memory);
  free(data);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

void *scratch(ScratchKind kind, size_t bytes) {
  pthread_once(&scratch_once, make_scratch_key);
  Scratch *all = pthread_getspecific(scratch_key);
  if (!all) {
    all = calloc(SCRATCHES, sizeof *all);
    if (!all || pthread_setspecific(scratch_key, all)) {
      free(all);
      lacked_memory = true;
      return NULL;
    }
  }
  Scratch *mine = &all[kind];
  if (bytes > mine->held) {
    free(mine->memory);
    mine->held = (bytes + 4095) / 4096 * 4096;
    mine->memory = aligned_alloc(64, mine->held);
    if (!mine->memory) {
      mine->held = 0;
      lacked_memory = true;
    }
  }
  return mine->memory;
}

XLA_FFI_Error *fail(XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args arguments = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                         .message = message,
                                         .errc = XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&arguments);
}

bool answer_metadata(XLA_FFI_CallFrame *frame) {
  // Its type has another name in each release of JAX; what is in it has not changed.
  __typeof__(frame->extension_start) extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return true;
}

static const void *find_scalar(XLA_FFI_CallFrame *frame, const char *name) {
  for (int64_t at = 0; at < frame->attrs.size; at++) {
    XLA_FFI_ByteSpan *span = frame->attrs.names[at];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len))
      return ((XLA_FFI_Scalar *)frame->attrs.attrs[at])->value;
  }
  return NULL;
}

float get_float(XLA_FFI_CallFrame *frame, const char *name) {
  const void *value = find_scalar(frame, name);
  float number = 0;
  if (value) memcpy(&number, value, sizeof number);
  return number;
}

int64_t get_integer(XLA_FFI_CallFrame *frame, const char *name) {
  const void *value = find_scalar(frame, name);
  int64_t number = 0;
  if (value) memcpy(&number, value, sizeof number);
  return number;
}
