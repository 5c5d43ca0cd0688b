// The Python module: addresses and numbers in, nothing of torch's own classes, so that one build serves every version
// of torch, and of Python from 3.11 on. The caller (_cpu.py) has checked the tensors.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstring>
#include <new>
#include <vector>

#include "exchange.h"
#include "plan.h"

namespace {

using dynorm::Kernels;
using dynorm::Numbers;
using dynorm::Problem;

const Kernels* chosen = nullptr;

const Kernels* best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return &dynorm::kernels_avx512();
  }
  // Every processor with AVX2 and FMA has F16C.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &dynorm::kernels_avx2();
#endif
  return &dynorm::kernels_portable();
}

std::int64_t integer(PyObject* value) { return PyLong_AsLongLong(value); }
// As many as int counts.
constexpr std::int32_t kMostWitnesses = INT32_MAX;
void* address(PyObject* value) { return PyLong_AsVoidPtr(value); }

// Pairs of an address and a code: the dtype, and 4 where there is more than one number.
void read(PyObject* const* arguments, Numbers* numbers, int count = dynorm::kRoles) {
  for (int role = 0; role < count; ++role) {
    const std::int64_t code = integer(arguments[2 * role + 1]);
    numbers[role] = {address(arguments[2 * role]), static_cast<dynorm::Dtype>(code & 3), (code & 4) != 0};
  }
}

// A tuple of channels, into memory that the next call of this thread takes. None, or more of them than channels, do not
// fit.
void read_witnesses(PyObject* channels, Problem& problem) {
  static thread_local std::vector<std::int64_t> memory;
  const Py_ssize_t count = PyTuple_Size(channels);
  problem.witnesses = -1;
  if (count < 1 || count > problem.channels || count > kMostWitnesses) return;
  try {
    memory.resize(count);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return;
  }
  for (Py_ssize_t i = 0; i < count; ++i) memory[i] = integer(PyTuple_GetItem(channels, i));
  problem.witnesses = static_cast<int>(count);
  problem.witness = memory.data();
}

// function, logarithmic, dtype, size, channels, inner, scale, x, then the parameters.
constexpr Py_ssize_t kProblemArguments = 8 + 2 * dynorm::kRoles;

Problem read_problem(PyObject* const* a) {
  Problem problem{static_cast<dynorm::Function>(integer(a[0])), integer(a[1]) != 0,
                  static_cast<dynorm::Dtype>(integer(a[2])), integer(a[3]), integer(a[4]), integer(a[5]),
                  PyFloat_AsDouble(a[6]), address(a[7]), {}, 0, nullptr, {}};
  read(a + 8, problem.parameters);
  return problem;
}

bool valid(const Problem& p) {
  if (PyErr_Occurred() != nullptr) return false;
  bool fits = p.function >= 0 && p.function < dynorm::kNamed && p.size >= 0 && p.channels > 0 && p.inner > 0 &&
              p.size % (p.channels * p.inner) == 0 && p.parameters[dynorm::kConstant].data != nullptr &&
              (p.witnesses == 0 || (p.witnesses > 0 && p.inner == 1));
  for (int i = 0; i < p.witnesses; ++i) fits = fits && p.witness[i] >= 0 && p.witness[i] < p.channels;
  if (!fits) PyErr_SetString(PyExc_ValueError, "the kernel was called with sizes that do not fit together");
  return fits;
}

// Run without Python's lock where it takes long enough for another thread to matter.
template <class Work>
PyObject* run(const Problem& problem, const Work& work) {
  bool enough_memory = true;
  PyThreadState* state = problem.size >= 32768 ? PyEval_SaveThread() : nullptr;
  try {
    work();
  } catch (const std::bad_alloc&) {
    enough_memory = false;
  }
  if (state != nullptr) PyEval_RestoreThread(state);
  if (!enough_memory) return PyErr_NoMemory();
  return Py_NewRef(Py_None);
}

// ..., y; where there are witnesses, their channels and the pair of log_gain
PyObject* forward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  constexpr Py_ssize_t kOwn = kProblemArguments + 1;
  if (count != kOwn && count != kOwn + 3) return PyErr_Format(PyExc_TypeError, "forward got %zd arguments", count);
  Problem problem = read_problem(a);
  if (count > kOwn) {
    read_witnesses(a[kOwn], problem);
    read(a + kOwn + 1, &problem.log_gain, 1);
  }
  void* y = address(a[kProblemArguments]);
  if (!valid(problem)) return nullptr;
  return run(problem, [&] { dynorm::forward(*chosen, problem, y); });
}

// ..., grad_y, grad_x, then the gradients of the parameters; where there are witnesses, as for forward, and log_gain's
PyObject* backward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  constexpr Py_ssize_t kOwn = kProblemArguments + 2 + 2 * dynorm::kRoles;
  if (count != kOwn && count != kOwn + 5) return PyErr_Format(PyExc_TypeError, "backward got %zd arguments", count);
  Problem problem = read_problem(a);
  const void* grad_y = address(a[kProblemArguments]);
  void* grad_x = address(a[kProblemArguments + 1]);
  dynorm::Gradients gradients{};
  read(a + kProblemArguments + 2, gradients.parameters);
  if (count > kOwn) {
    read_witnesses(a[kOwn], problem);
    read(a + kOwn + 1, &problem.log_gain, 1);
    read(a + kOwn + 3, &gradients.log_gain, 1);
  }
  if (!valid(problem)) return nullptr;
  return run(problem, [&] { dynorm::backward(*chosen, problem, grad_y, grad_x, gradients); });
}

// What torch gives at import: its table of functions, the types that are plain tensors, torch.empty_like, whether
// gradients are recorded, and what is called to learn whether anything watches operations one by one.
struct Torch {
  const dynorm::ExchangeApi* api = nullptr;
  PyObject *tensor, *parameter, *empty_like, *is_grad_enabled, *requires_grad, *is_neg, *watchers, *forward_ad, *level;
};
Torch torch;

bool plain(PyObject* p) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(p));
  return type == torch.tensor || type == torch.parameter;
}

// 1: true, 0: false, -1: an exception is set. Steals the reference.
int truth(PyObject* answer) {
  if (answer == nullptr) return -1;
  const int result = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return result;
}

int watched() {
  const Py_ssize_t count = PyTuple_Size(torch.watchers);
  for (Py_ssize_t i = 0; i < count; ++i) {
    // None, an empty stack's size 0 or False.
    const int seen = truth(PyObject_CallNoArgs(PyTuple_GetItem(torch.watchers, i)));
    if (seen != 0) return seen;
  }
  PyObject* level = PyObject_GetAttr(torch.forward_ad, torch.level);
  if (level == nullptr) return -1;
  const long value = PyLong_AsLong(level);
  Py_DECREF(level);
  return PyErr_Occurred() != nullptr ? -1 : value >= 0;
}

// A tensor in contiguous memory of the processor, of a dtype there are kernels for; false, with no exception set, where
// it is not.
bool look(PyObject* p, dynorm::Strided& t, dynorm::Dtype& dtype) {
  if (!plain(p)) return false;
  if (torch.api->look(p, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  return dynorm::usable(t, dtype);
}

// A tensor like another, and its memory; null with an exception set where there is none.
PyObject* like(PyObject* tensor, dynorm::Strided& memory) {
  PyObject* made = PyObject_CallFunctionObjArgs(torch.empty_like, tensor, nullptr);
  if (made != nullptr && torch.api->look(made, &memory) == 0) return made;
  Py_XDECREF(made);
  return nullptr;
}

// Whether a tensor's sign is a bit that memory does not show: 1, 0, or -1 with an exception set. A parameter may have it
// only if it has one element: a larger one has strides.
int negated(PyObject* tensor) { return truth(PyObject_CallFunctionObjArgs(torch.is_neg, tensor, nullptr)); }

// What is left of a problem whose dtype, channels and parameters are known: x, and function, logarithmic and scale.
void complete(Problem& problem, const dynorm::Strided& x, PyObject* const* form) {
  problem.function = static_cast<dynorm::Function>(integer(form[0]));
  problem.logarithmic = Py_IsTrue(form[1]);
  problem.size = dynorm::elements(x);
  problem.inner = 1;
  problem.scale = PyFloat_AsDouble(form[2]);
  problem.x = x.data;
}

// Whether log_gain is as the witnesses need it: 1, 0, or -1 with an exception set.
int read_gains(PyObject* log_gain, Problem& problem) {
  if (problem.witnesses < 0) return PyErr_Occurred() != nullptr ? -1 : 0;
  if (Py_IsNone(log_gain)) return 1;
  dynorm::Strided t;
  dynorm::Dtype dtype;
  if (!look(log_gain, t, dtype) || t.dims != 1 || t.shape[0] != problem.witnesses) return 0;
  problem.log_gain = {t.data, dtype, problem.witnesses > 1};
  const int hidden = problem.witnesses == 1 ? negated(log_gain) : 0;
  return hidden < 0 ? -1 : !hidden;
}

// Whether autograd records what becomes of a tensor: 1, 0, or -1 with an exception set.
int recorded(PyObject* tensor) { return Py_IsNone(tensor) ? 0 : truth(PyObject_GetAttr(tensor, torch.requires_grad)); }

// x, constant, shift, center, weight, bias, function, logarithmic, scale, normalized shape; where there are witnesses,
// their channels and log_gain. The function of x, whose last sizes are the normalized shape; True where x and the
// parameters are as the kernels need them but a gradient is wanted; None where the slow way has to decide.
PyObject* serve(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != 10 && count != 12) return PyErr_Format(PyExc_TypeError, "serve got %zd arguments", count);
  if (!PyTuple_Check(a[9])) return PyErr_Format(PyExc_TypeError, "the normalized shape must be a tuple");
  if (torch.api == nullptr) return Py_NewRef(Py_None);
  Problem problem{};
  dynorm::Strided x;
  const Py_ssize_t dims = PyTuple_Size(a[9]);
  if (dims < 1 || !look(a[0], x, problem.dtype) || x.dims < dims) return Py_NewRef(Py_None);
  constexpr Py_ssize_t kMostDims = 8;
  std::int64_t shape[kMostDims];
  problem.channels = 1;
  for (Py_ssize_t d = 0; d < dims; ++d) {
    if (d == kMostDims) return Py_NewRef(Py_None);
    shape[d] = integer(PyTuple_GetItem(a[9], d));
    if (PyErr_Occurred() != nullptr) return nullptr;
    if (x.shape[x.dims - dims + d] != shape[d]) return Py_NewRef(Py_None);
    problem.channels *= shape[d];
  }
  for (int role = 0; role < dynorm::kRoles; ++role) {
    PyObject* p = a[1 + role];
    if (Py_IsNone(p)) continue;
    dynorm::Strided t;
    dynorm::Dtype dtype;
    if (!look(p, t, dtype)) return Py_NewRef(Py_None);
    const bool whole = t.dims == dims && std::memcmp(t.shape, shape, dims * sizeof(std::int64_t)) == 0;
    const bool one = role <= dynorm::kCenter && t.dims == 1 && t.shape[0] == 1;
    if (!whole && !one) return Py_NewRef(Py_None);
    const int hidden = dynorm::elements(t) == 1 ? negated(p) : 0;
    if (hidden != 0) return hidden < 0 ? nullptr : Py_NewRef(Py_None);
    problem.parameters[role] = {t.data, dtype, whole && problem.channels > 1};
  }
  if (count > 10) {
    read_witnesses(a[10], problem);
    const int fits = read_gains(a[11], problem);
    if (fits != 1) return fits < 0 ? nullptr : Py_NewRef(Py_None);
  }
  const int hidden = negated(a[0]), seen = hidden != 0 ? hidden : watched();
  if (seen != 0) return seen < 0 ? nullptr : Py_NewRef(Py_None);
  int gradient = truth(PyObject_CallNoArgs(torch.is_grad_enabled));
  for (int i = 0, any = 0; gradient == 1 && any == 0; ++i) {
    if (i > dynorm::kRoles) any = count > 10 ? recorded(a[11]) : 0;
    if (i <= dynorm::kRoles) any = recorded(a[i]);
    if (any < 0 || (any == 0 && i > dynorm::kRoles)) gradient = any;
  }
  if (gradient != 0) return gradient < 0 ? nullptr : Py_NewRef(Py_True);
  dynorm::Strided out;
  PyObject* y = like(a[0], out);
  if (y == nullptr) return nullptr;
  complete(problem, x, a + 6);
  PyObject* done = valid(problem) ? run(problem, [&] { dynorm::forward(*chosen, problem, out.data); }) : nullptr;
  if (done == nullptr) {
    Py_DECREF(y);
    return nullptr;
  }
  Py_DECREF(done);
  return y;
}

// grad, (x, constant, shift, center, weight, bias), needs_input_grad, function, logarithmic, scale, channels; where there
// are witnesses, log_gain is a seventh tensor and their channels an eighth argument. The gradients of what autograd's
// function was called with: its form, x and the parameters; None where the slow way has to decide.
PyObject* serve_gradients(PyObject*, PyObject* const* a, Py_ssize_t count) {
  constexpr Py_ssize_t kOwn = 1 + dynorm::kRoles;
  if (count != 7 && count != 8) return PyErr_Format(PyExc_TypeError, "serve_gradients got %zd arguments", count);
  const Py_ssize_t kInputs = count == 7 ? kOwn : kOwn + 1;
  if (!PyTuple_Check(a[1]) || PyTuple_Size(a[1]) != kInputs || !PyTuple_Check(a[2]) ||
      PyTuple_Size(a[2]) != 1 + kInputs) {
    return PyErr_Format(PyExc_TypeError, "serve_gradients needs %zd tensors, and what of them is needed", kInputs);
  }
  if (torch.api == nullptr) return Py_NewRef(Py_None);
  Problem problem{};
  dynorm::Strided x, grad;
  dynorm::Dtype dtype;
  PyObject* inputs[kOwn + 1];
  for (Py_ssize_t i = 0; i < kInputs; ++i) inputs[i] = PyTuple_GetItem(a[1], i);
  if (!look(a[0], grad, dtype) || !look(inputs[0], x, problem.dtype) || dtype != problem.dtype || grad.dims != x.dims ||
      std::memcmp(grad.shape, x.shape, x.dims * sizeof(std::int64_t)) != 0) {
    return Py_NewRef(Py_None);
  }
  problem.channels = integer(a[6]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  for (int role = 0; role < dynorm::kRoles; ++role) {
    PyObject* p = inputs[1 + role];
    if (Py_IsNone(p)) continue;
    dynorm::Strided t;
    if (!look(p, t, dtype)) return Py_NewRef(Py_None);
    const std::int64_t size = dynorm::elements(t);
    if (size != problem.channels && (size != 1 || role > dynorm::kCenter)) return Py_NewRef(Py_None);
    const int hidden = size == 1 ? negated(p) : 0;
    if (hidden != 0) return hidden < 0 ? nullptr : Py_NewRef(Py_None);
    problem.parameters[role] = {t.data, dtype, size > 1};
  }
  if (count > 7) {
    read_witnesses(a[7], problem);
    const int fits = read_gains(inputs[kOwn], problem);
    if (fits != 1) return fits < 0 ? nullptr : Py_NewRef(Py_None);
  }
  int slow = negated(inputs[0]);
  if (slow == 0) slow = negated(a[0]);
  // A gradient of the gradient is wanted.
  if (slow == 0) slow = truth(PyObject_CallNoArgs(torch.is_grad_enabled));
  if (slow == 0) slow = watched();
  if (slow != 0) return slow < 0 ? nullptr : Py_NewRef(Py_None);
  complete(problem, x, a + 3);
  if (!valid(problem)) return nullptr;
  PyObject* found = PyTuple_New(1 + kInputs);
  if (found == nullptr) return nullptr;
  void* grad_x = nullptr;
  dynorm::Gradients gradients{};
  PyTuple_SetItem(found, 0, Py_NewRef(Py_None));
  for (Py_ssize_t i = 0; i < kInputs; ++i) {
    PyObject* made = nullptr;
    if (PyObject_IsTrue(PyTuple_GetItem(a[2], 1 + i)) == 1 && !Py_IsNone(inputs[i])) {
      dynorm::Strided memory;
      made = like(inputs[i], memory);
      if (made == nullptr) {
        Py_DECREF(found);
        return nullptr;
      }
      if (i == 0) {
        grad_x = memory.data;
      } else {
        Numbers& gradient = i < kOwn ? gradients.parameters[i - 1] : gradients.log_gain;
        gradient = i < kOwn ? problem.parameters[i - 1] : problem.log_gain;
        gradient.data = memory.data;
      }
    }
    PyTuple_SetItem(found, 1 + i, made == nullptr ? Py_NewRef(Py_None) : made);
  }
  PyObject* done = run(problem, [&] { dynorm::backward(*chosen, problem, grad.data, grad_x, gradients); });
  if (done == nullptr) {
    Py_DECREF(found);
    return nullptr;
  }
  Py_DECREF(done);
  return found;
}

// The capsule of torch.Tensor.__dlpack_c_exchange_api__, then the objects of `Torch` in order.
PyObject* set_torch(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != 10) return PyErr_Format(PyExc_TypeError, "set_torch got %zd arguments", count);
  const auto* api = static_cast<const dynorm::ExchangeApi*>(PyCapsule_GetPointer(a[0], "dlpack_exchange_api"));
  if (api == nullptr) return nullptr;
  PyObject** fields[] = {&torch.tensor, &torch.parameter, &torch.empty_like, &torch.is_grad_enabled,
                         &torch.requires_grad, &torch.is_neg, &torch.watchers, &torch.forward_ad, &torch.level};
  for (Py_ssize_t i = 0; i < 9; ++i) *fields[i] = Py_NewRef(a[1 + i]);
  // Other versions may have another table: then the slow way serves.
  if (api->major == 1 && api->look != nullptr) torch.api = api;
  return PyBool_FromLong(torch.api != nullptr);
}

// The address of torch_parallel_for, or 0.
PyObject* set_parallel_for(PyObject*, PyObject* value) {
  void* function = address(value);
  if (PyErr_Occurred() != nullptr) return nullptr;
  dynorm::set_parallel_for(reinterpret_cast<dynorm::ParallelFor>(function));
  return Py_NewRef(Py_None);
}

PyObject* name(PyObject*, PyObject*) { return PyUnicode_FromString(chosen->name); }

// For tests: another instruction set than the best, by name, if this processor has it.
PyObject* choose(PyObject*, PyObject* wanted) {
  const Kernels* found = best();
  const char* text = PyUnicode_AsUTF8AndSize(wanted, nullptr);
  if (text == nullptr) return nullptr;
#if defined(__x86_64__)
  if (std::strcmp(text, "cpu-avx2") == 0 && found != &dynorm::kernels_portable()) found = &dynorm::kernels_avx2();
#endif
  if (std::strcmp(text, "cpu-portable") == 0) found = &dynorm::kernels_portable();
  if (std::strcmp(text, found->name) != 0) return PyErr_Format(PyExc_ValueError, "no instruction set %s here", text);
  chosen = found;
  return Py_NewRef(Py_None);
}

template <class F>
PyCFunction function(F f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

PyMethodDef methods[] = {
    {"forward", function(forward), METH_FASTCALL, nullptr},
    {"backward", function(backward), METH_FASTCALL, nullptr},
    {"serve", function(serve), METH_FASTCALL, nullptr},
    {"serve_gradients", function(serve_gradients), METH_FASTCALL, nullptr},
    {"set_torch", function(set_torch), METH_FASTCALL, nullptr},
    {"set_parallel_for", set_parallel_for, METH_O, nullptr},
    {"name", name, METH_NOARGS, nullptr},
    {"choose", choose, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "dynorm.kernels._native", nullptr, -1, methods, nullptr, nullptr,
                          nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  chosen = best();
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr && PyModule_AddIntConstant(module, "MOST_WITNESSES", kMostWitnesses) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
