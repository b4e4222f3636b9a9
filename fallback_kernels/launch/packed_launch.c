/* Launches a kernel whose parameters are packed: a replay puts in addresses and the stream.
   Beside it, what forks and joins streams.

   What Triton's launcher does in C for each launch (parse arguments, look types up) is done once,
   in `prepare`. Compiled at the first launch plan, as Triton compiles its own launcher. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

#define MAX_BYTES 8192
#define MAX_PARAMETERS 256

/* Where an address goes: byte of the parameters, register, bytes behind the register's address. */
typedef struct {
  uint32_t at, from;
  int64_t offset;
} Patch;

typedef struct {
  CUfunction function;
  CUlaunchConfig config;
  CUlaunchAttribute attributes[2];
  int device;
  Py_ssize_t num_parameters, num_bytes, num_pointers, num_maps;
  uint32_t *places; /* of each parameter among the bytes */
  unsigned char *bytes;
  Patch *pointers, *maps;
} Launch;

static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*replace_address)(CUtensorMap *, void *);
static CUresult (*get_error_string)(CUresult, const char **);
static CUresult (*get_context)(CUcontext *);
static CUresult (*set_context)(CUcontext);
static CUresult (*get_device)(CUdevice *, int);
static CUresult (*retain_context)(CUcontext *, CUdevice);
static CUresult (*create_event)(CUevent *, unsigned);
static CUresult (*record_event)(CUevent, CUstream);
static CUresult (*wait_event)(CUstream, CUevent, unsigned);
static CUresult (*destroy_event)(CUevent);
static CUresult (*get_parameter)(CUfunction, size_t, size_t *, size_t *); /* NULL before 12.4 */

static PyObject *fail(CUresult code) {
  const char *text = NULL;
  get_error_string(code, &text);
  return PyErr_Format(PyExc_RuntimeError, "CUDA error at a launch: %s", text ? text : "unknown");
}

static void free_launch(PyObject *capsule) {
  Launch *x = PyCapsule_GetPointer(capsule, NULL);
  if (x == NULL) return;
  free(x->places), free(x->bytes), free(x->pointers), free(x->maps), free(x);
}

static void *copied(Py_buffer *from) {
  void *memory = malloc(from->len ? from->len : 1);
  if (memory != NULL) memcpy(memory, from->buf, from->len);
  return memory;
}

/* Whether the driver, where it can tell, has these sizes of the kernel's parameters. */
static int has_sizes(CUfunction function, const uint32_t *sizes, Py_ssize_t number) {
  size_t offset, size;
  if (get_parameter == NULL || get_parameter(function, 0, &offset, &size) != CUDA_SUCCESS) return 1;
  for (Py_ssize_t i = 0; i < number; ++i)
    if (get_parameter(function, i, &offset, &size) != CUDA_SUCCESS || size != sizes[i]) return 0;
  return get_parameter(function, number, &offset, &size) != CUDA_SUCCESS;
}

/* prepare(function, device, (x, y, z), threads, shared, cooperative, pdl, places, sizes, bytes,
   pointers, maps): a capsule. Raises ValueError where the kernel takes something else. */
static PyObject *prepare(PyObject *self, PyObject *args) {
  unsigned long long function;
  int device, cooperative, pdl;
  unsigned grid[3], threads, shared;
  Py_buffer places, sizes, bytes, pointers, maps;
  if (!PyArg_ParseTuple(args, "Ki(III)IIppy*y*y*y*y*", &function, &device, &grid[0], &grid[1],
                        &grid[2], &threads, &shared, &cooperative, &pdl, &places, &sizes, &bytes,
                        &pointers, &maps))
    return NULL;
  PyObject *capsule = NULL;
  Launch *x = calloc(1, sizeof(Launch));
  if (x == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  capsule = PyCapsule_New(x, NULL, free_launch);
  if (capsule == NULL) {
    free(x);
    goto done;
  }
  x->function = (CUfunction)(uintptr_t)function;
  x->device = device;
  x->num_parameters = places.len / sizeof(uint32_t);
  x->num_bytes = bytes.len;
  x->num_pointers = pointers.len / sizeof(Patch);
  x->num_maps = maps.len / sizeof(Patch);
  if (x->num_bytes > MAX_BYTES || x->num_parameters > MAX_PARAMETERS ||
      !has_sizes(x->function, sizes.buf, x->num_parameters)) {
    PyErr_SetString(PyExc_ValueError, "the kernel takes other parameters");
    Py_CLEAR(capsule);
    goto done;
  }
  x->places = copied(&places), x->bytes = copied(&bytes);
  x->pointers = copied(&pointers), x->maps = copied(&maps);
  if (!x->places || !x->bytes || !x->pointers || !x->maps) {
    PyErr_NoMemory();
    Py_CLEAR(capsule);
    goto done;
  }
  CUlaunchConfig *config = &x->config;
  config->gridDimX = grid[0], config->gridDimY = grid[1], config->gridDimZ = grid[2];
  config->blockDimX = threads, config->blockDimY = config->blockDimZ = 1;
  config->sharedMemBytes = shared;
  config->attrs = x->attributes;
  if (pdl) {
    CUlaunchAttribute *attribute = &x->attributes[config->numAttrs++];
    attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute->value.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    CUlaunchAttribute *attribute = &x->attributes[config->numAttrs++];
    attribute->id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute->value.cooperative = 1;
  }
done:
  PyBuffer_Release(&places), PyBuffer_Release(&sizes), PyBuffer_Release(&bytes);
  PyBuffer_Release(&pointers), PyBuffer_Release(&maps);
  return capsule;
}

/* A thread on which nobody used CUDA has no context. */
static CUresult need_context(int number) {
  CUcontext context = NULL;
  CUdevice device;
  CUresult code = get_context(&context);
  if (code == CUDA_SUCCESS && context == NULL) {
    if ((code = get_device(&device, number)) != CUDA_SUCCESS) return code;
    if ((code = retain_context(&context, device)) != CUDA_SUCCESS) return code;
    code = set_context(context);
  }
  return code;
}

/* addresses: of all registers, a list. */
static int read_address(PyObject *addresses, const Patch *patch, uint64_t *address) {
  if (patch->from >= (uint32_t)PyList_GET_SIZE(addresses)) {
    PyErr_SetString(PyExc_IndexError, "a register that is not there");
    return 0;
  }
  PyObject *item = PyList_GET_ITEM(addresses, patch->from);
  *address = PyLong_AsUnsignedLongLong(item) + patch->offset;
  return !PyErr_Occurred();
}

/* Launches what a capsule holds; 0 with an exception set where it fails. */
static int launch_one(PyObject *capsule, PyObject *addresses, CUstream stream) {
  const Launch *x = PyCapsule_GetPointer(capsule, NULL);
  if (x == NULL) return 0;
  CUlaunchConfig config = x->config;
  config.hStream = stream;
  if (config.gridDimX == 0 || config.gridDimY == 0 || config.gridDimZ == 0) return 1;

  /* Copies on this thread's stack: several may replay one plan. */
  _Alignas(128) unsigned char bytes[MAX_BYTES];
  void *parameters[MAX_PARAMETERS];
  memcpy(bytes, x->bytes, x->num_bytes);
  for (Py_ssize_t i = 0; i < x->num_pointers; ++i) {
    uint64_t address;
    if (!read_address(addresses, &x->pointers[i], &address)) return 0;
    memcpy(bytes + x->pointers[i].at, &address, sizeof(address));
  }
  CUresult code = need_context(x->device);
  for (Py_ssize_t i = 0; code == CUDA_SUCCESS && i < x->num_maps; ++i) {
    uint64_t address;
    if (!read_address(addresses, &x->maps[i], &address)) return 0;
    code = replace_address((CUtensorMap *)(bytes + x->maps[i].at), (void *)(uintptr_t)address);
  }
  if (code != CUDA_SUCCESS) {
    fail(code);
    return 0;
  }
  for (Py_ssize_t i = 0; i < x->num_parameters; ++i) parameters[i] = bytes + x->places[i];
  Py_BEGIN_ALLOW_THREADS;
  code = launch_kernel(&config, x->function, parameters, NULL);
  Py_END_ALLOW_THREADS;
  if (code != CUDA_SUCCESS) fail(code);
  return code == CUDA_SUCCESS;
}

/* launch(capsules: a tuple, addresses of all registers: a list, stream), one after the other */
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t number) {
  if (number != 3 || !PyTuple_Check(args[0]) || !PyList_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "launch takes a tuple of capsules, a list and a stream");
    return NULL;
  }
  CUstream stream = (CUstream)(uintptr_t)PyLong_AsUnsignedLongLong(args[2]);
  if (PyErr_Occurred()) return NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); ++i)
    if (!launch_one(PyTuple_GET_ITEM(args[0], i), args[1], stream)) return NULL;
  Py_RETURN_NONE;
}

/* wait(stream, other, device): what the stream is given next starts after what the other has. */
static PyObject *wait(PyObject *self, PyObject *const *args, Py_ssize_t number) {
  if (number != 3) {
    PyErr_SetString(PyExc_TypeError, "wait takes two streams and a device");
    return NULL;
  }
  CUstream stream = (CUstream)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
  CUstream other = (CUstream)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
  long device = PyLong_AsLong(args[2]);
  if (PyErr_Occurred()) return NULL;
  CUevent event;
  CUresult code = need_context((int)device);
  if (code == CUDA_SUCCESS) code = create_event(&event, CU_EVENT_DISABLE_TIMING);
  if (code != CUDA_SUCCESS) return fail(code);
  code = record_event(event, other);
  if (code == CUDA_SUCCESS) code = wait_event(stream, event, 0);
  CUresult last = destroy_event(event); /* once it has happened */
  if (code == CUDA_SUCCESS) code = last;
  if (code != CUDA_SUCCESS) return fail(code);
  Py_RETURN_NONE;
}

/* The object that Triton keeps a tensor map in. */
typedef struct {
  PyObject_HEAD;
  _Alignas(128) CUtensorMap tensor_map;
} TensorMap;

/* tensor_map_bytes(object of Triton's type PyCUtensorMap) */
static PyObject *tensor_map_bytes(PyObject *self, PyObject *object) {
  if (strstr(Py_TYPE(object)->tp_name, "PyCUtensorMap") == NULL ||
      Py_TYPE(object)->tp_basicsize != sizeof(TensorMap)) {
    PyErr_SetString(PyExc_ValueError, "not a tensor map of Triton's");
    return NULL;
  }
  return PyBytes_FromStringAndSize((char *)&((TensorMap *)object)->tensor_map, sizeof(CUtensorMap));
}

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {"wait", (PyCFunction)(void (*)(void))wait, METH_FASTCALL, NULL},
    {"tensor_map_bytes", tensor_map_bytes, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "packed_launch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_packed_launch(void) {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == NULL) {
    PyErr_SetString(PyExc_ImportError, "there is no libcuda.so.1");
    return NULL;
  }
  launch_kernel = dlsym(library, "cuLaunchKernelEx");
  replace_address = dlsym(library, "cuTensorMapReplaceAddress");
  get_error_string = dlsym(library, "cuGetErrorString");
  get_context = dlsym(library, "cuCtxGetCurrent");
  set_context = dlsym(library, "cuCtxSetCurrent");
  get_device = dlsym(library, "cuDeviceGet");
  retain_context = dlsym(library, "cuDevicePrimaryCtxRetain");
  create_event = dlsym(library, "cuEventCreate");
  record_event = dlsym(library, "cuEventRecord");
  wait_event = dlsym(library, "cuStreamWaitEvent");
  destroy_event = dlsym(library, "cuEventDestroy_v2");
  get_parameter = dlsym(library, "cuFuncGetParamInfo");
  if (!launch_kernel || !replace_address || !get_error_string || !get_context || !set_context ||
      !get_device || !retain_context || !create_event || !record_event || !wait_event ||
      !destroy_event) {
    PyErr_SetString(PyExc_ImportError, "libcuda.so.1 lacks functions of CUDA 12");
    return NULL;
  }
  return PyModule_Create(&definition);
}
