#include "common.h"

#include <pthread.h>
#include <sched.h>

typedef struct {
  atomic_int next, finished, users;
  int units;
  void (*work)(const void *, int);
  const void *arguments;
} Job;

static void take_units(Job *job) {
  for (int unit; (unit = atomic_fetch_add(&job->next, 1)) < job->units;) {
    job->work(job->arguments, unit);
    atomic_fetch_add(&job->finished, 1);
  }
}

static void leave(Job *job) {
  if (atomic_fetch_sub(&job->users, 1) == 1) free(job);
}

static void help(void *data) {
  take_units(data);
  leave(data);
}

static void wait_a_little(int tries) {
  if (tries > 4000) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void run_parallel(XLA_FFI_CallFrame *frame, int threads, int units, void (*work)(const void *, int),
                  const void *arguments) {
  int helpers = (threads < units ? threads : units) - 1;
  Job *job = helpers > 0 ? malloc(sizeof *job) : NULL;
  if (!job) {
    for (int unit = 0; unit < units; unit++) work(arguments, unit);
    return;
  }
  *job = (Job){.users = helpers + 1, .units = units, .work = work, .arguments = arguments};
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
  for (int tries = 0; atomic_load(&job->finished) < units; tries++) wait_a_little(tries);
  leave(job);
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
  free(((Scratch *)data)->memory);
  free(data);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

void *scratch(size_t bytes) {
  pthread_once(&scratch_once, make_scratch_key);
  Scratch *mine = pthread_getspecific(scratch_key);
  if (!mine) {
    mine = calloc(1, sizeof *mine);
    if (!mine || pthread_setspecific(scratch_key, mine)) {
      free(mine);
      return NULL;
    }
  }
  if (bytes > mine->held) {
    free(mine->memory);
    mine->held = (bytes + 4095) / 4096 * 4096;
    mine->memory = aligned_alloc(64, mine->held);
    if (!mine->memory) mine->held = 0;
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

float get_float(XLA_FFI_CallFrame *frame, const char *name) {
  for (int64_t at = 0; at < frame->attrs.size; at++) {
    XLA_FFI_ByteSpan *span = frame->attrs.names[at];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len)) {
      float number;
      memcpy(&number, ((XLA_FFI_Scalar *)frame->attrs.attrs[at])->value, sizeof number);
      return number;
    }
  }
  return 0;
}
