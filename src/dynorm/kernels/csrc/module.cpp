// The Python module: addresses and numbers in, nothing of torch's own classes, so that one build serves every version
// of torch, and of Python from 3.11 on. The caller (_cpu.py) has checked the tensors.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstring>
#include <new>

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
void* address(PyObject* value) { return PyLong_AsVoidPtr(value); }

// Pairs of an address and a code: the dtype, and 4 where there is more than one number.
void read(PyObject* const* arguments, Numbers (&numbers)[dynorm::kRoles]) {
  for (int role = 0; role < dynorm::kRoles; ++role) {
    const std::int64_t code = integer(arguments[2 * role + 1]);
    numbers[role] = {address(arguments[2 * role]), static_cast<dynorm::Dtype>(code & 3), (code & 4) != 0};
  }
}

// function, logarithmic, scale, dtype, rows, channels, x, then the parameters and the numbers of tokens.
constexpr Py_ssize_t kProblemArguments = 7 + 2 * dynorm::kRoles;

// False with an exception set if the arguments do not fit together.
bool read_problem(PyObject* const* a, Problem& p) {
  p = {static_cast<dynorm::Function>(integer(a[0])), integer(a[1]) != 0, static_cast<dynorm::Dtype>(integer(a[3])),
       integer(a[4]), integer(a[5]), PyFloat_AsDouble(a[2]), address(a[6]), {}};
  read(a + 7, p.parameters);
  if (PyErr_Occurred() != nullptr) return false;
  const bool fits = p.function >= 0 && p.function < dynorm::kNamed && p.rows >= 0 && p.channels > 0 &&
                    p.parameters[dynorm::kConstant].data != nullptr;
  if (!fits) PyErr_SetString(PyExc_ValueError, "the kernel was called with sizes that do not fit together");
  return fits;
}

// Run without Python's lock where it takes long enough for another thread to matter.
template <class Work>
PyObject* run(const Problem& problem, const Work& work) {
  bool enough_memory = true;
  PyThreadState* state = problem.rows * problem.channels >= 32768 ? PyEval_SaveThread() : nullptr;
  try {
    work();
  } catch (const std::bad_alloc&) {
    enough_memory = false;
  }
  if (state != nullptr) PyEval_RestoreThread(state);
  if (!enough_memory) return PyErr_NoMemory();
  return Py_NewRef(Py_None);
}

// ..., y
PyObject* forward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != kProblemArguments + 1) return PyErr_Format(PyExc_TypeError, "forward got %zd arguments", count);
  Problem problem;
  void* y = address(a[kProblemArguments]);
  if (!read_problem(a, problem)) return nullptr;
  return run(problem, [&] { dynorm::forward(*chosen, problem, y); });
}

// ..., grad_y, grad_x, then the gradients of the parameters and of the numbers of tokens
PyObject* backward(PyObject*, PyObject* const* a, Py_ssize_t count) {
  constexpr Py_ssize_t kAll = kProblemArguments + 2 + 2 * dynorm::kRoles;
  if (count != kAll) return PyErr_Format(PyExc_TypeError, "backward got %zd arguments", count);
  Problem problem;
  const void* grad_y = address(a[kProblemArguments]);
  void* grad_x = address(a[kProblemArguments + 1]);
  Numbers gradients[dynorm::kRoles];
  read(a + kProblemArguments + 2, gradients);
  if (!read_problem(a, problem)) return nullptr;
  return run(problem, [&] { dynorm::backward(*chosen, problem, grad_y, grad_x, gradients); });
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
  return PyModule_Create(&definition);
}
