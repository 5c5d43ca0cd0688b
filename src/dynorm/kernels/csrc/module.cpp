// The Python module: tensors by DLPack and numbers in, nothing of torch's own headers, so that one build serves several
// versions of torch, and of Python from 3.11 on.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstring>
#include <new>

#include "plan.h"
#include "tensors.h"

namespace {

using dynorm::DLTensor;
using dynorm::Kernels;
using dynorm::Numbers;
using dynorm::Problem;
using dynorm::Reader;

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

// Given once by `connect`.
dynorm::Torch torch{};

// The tensors x, constant, shift, weight, bias and the numbers of tokens; then function, logarithmic, scale.
constexpr Py_ssize_t kNumbers = 1, kForm = kNumbers + dynorm::kRoles, kProblemArguments = kForm + 3;

// A call as the kernels take it, if the reader finds that it fits.
Problem read_problem(PyObject* const* a, Reader& reader, DLTensor& x) {
  Problem p{};
  p.function = static_cast<dynorm::Function>(PyLong_AsLong(a[kForm]));
  p.logarithmic = PyObject_IsTrue(a[kForm + 1]) == 1;
  p.scale = PyFloat_AsDouble(a[kForm + 2]);
  // The reader clears errors.
  reader.fits = PyErr_Occurred() == nullptr;
  if (!reader.fits) return p;
  x = reader.tensor(a[0], p.dtype);
  if (!reader.fits) return p;
  reader.fits = is_dense(x) && p.function >= 0 && p.function < dynorm::kNamed;
  if (!reader.fits) return p;
  p.x = x.data;
  p.channels = x.shape[x.ndim - 1];
  p.rows = 1;
  for (int i = 0; i + 1 < x.ndim; ++i) p.rows *= x.shape[i];
  for (int role = 0; role < dynorm::kRoles; ++role) {
    p.parameters[role] = reader.numbers(a[kNumbers + role], x, role);
  }
  const bool has_tokens = p.parameters[dynorm::kToken].data != nullptr;
  reader.fits = reader.fits && p.parameters[dynorm::kConstant].data != nullptr;
  reader.fits = reader.fits && (p.function == dynorm::kDyisru || !has_tokens);
  return p;
}

// True, or False where the tensors do not fit; without Python's lock where it takes long enough for another thread to
// matter.
template <class Work>
PyObject* run(const Reader& reader, const Problem& problem, const Work& work) {
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (!reader.fits) return Py_NewRef(Py_False);
  bool enough_memory = true;
  PyThreadState* state = problem.rows * problem.channels >= 32768 ? PyEval_SaveThread() : nullptr;
  try {
    work();
  } catch (const std::bad_alloc&) {
    enough_memory = false;
  }
  if (state != nullptr) PyEval_RestoreThread(state);
  if (!enough_memory) return PyErr_NoMemory();
  return Py_NewRef(Py_True);
}

// ..., y
PyObject* forward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != kProblemArguments + 1) return PyErr_Format(PyExc_TypeError, "forward got %zd arguments", count);
  Reader reader(torch);
  DLTensor x;
  const Problem problem = read_problem(a, reader, x);
  void* y = reader.like(a[kProblemArguments], x, problem.dtype);
  return run(reader, problem, [&] { dynorm::forward(*chosen, problem, y); });
}

// ..., grad_y, grad_x, then the gradients of the parameters and of the numbers of tokens; None for what is not wanted
PyObject* backward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  constexpr Py_ssize_t kAll = kProblemArguments + 2 + dynorm::kRoles;
  if (count != kAll) return PyErr_Format(PyExc_TypeError, "backward got %zd arguments", count);
  Reader reader(torch);
  DLTensor x;
  const Problem problem = read_problem(a, reader, x);
  const void* grad_y = reader.like(a[kProblemArguments], x, problem.dtype);
  void* grad_x = reader.like(a[kProblemArguments + 1], x, problem.dtype);
  Numbers gradients[dynorm::kRoles];
  for (int role = 0; role < dynorm::kRoles; ++role) {
    gradients[role] = reader.numbers(a[kProblemArguments + 2 + role], x, role);
  }
  return run(reader, problem, [&] { dynorm::backward(*chosen, problem, grad_y, grad_x, gradients); });
}

// The address of torch_parallel_for, or 0; torch's DLPack interface; its classes Tensor and Parameter.
PyObject* connect(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "connect got %zd arguments", count);
  void* function = PyLong_AsVoidPtr(a[0]);
  const void* exchange = PyCapsule_GetPointer(a[1], "dlpack_exchange_api");
  if (PyErr_Occurred() != nullptr) return nullptr;
  dynorm::set_parallel_for(reinterpret_cast<dynorm::ParallelFor>(function));
  torch = {static_cast<const dynorm::DLPackExchange*>(exchange), Py_NewRef(a[2]), Py_NewRef(a[3]),
           PyUnicode_InternFromString("is_neg")};
  if (torch.exchange->major != 1) return PyErr_Format(PyExc_ImportError, "DLPack has version %u", torch.exchange->major);
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
    {"connect", function(connect), METH_FASTCALL, nullptr},
    {"name", name, METH_NOARGS, nullptr},
    {"choose", choose, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "dynorm.kernels._native", nullptr, -1, methods, nullptr, nullptr,
                          nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  chosen = best();
  return PyModule_Create(&definition);
}
