// Included first in every unit of a Linux wheel (`make wheels`): it keeps a library that a newer g++
// compiles to the symbols of manylinux_2_28. Templates of the standard library are instantiated in
// the library itself, and the symbols that GCC 9 and later add are defined here.
#pragma once
#include <bits/c++config.h>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0

#if defined(__aarch64__)
__asm__(".symver exp, exp@GLIBC_2.17\n.symver log, log@GLIBC_2.17\n.symver pow, pow@GLIBC_2.17");
#else
__asm__(".symver exp, exp@GLIBC_2.2.5\n.symver log, log@GLIBC_2.2.5\n.symver pow, pow@GLIBC_2.2.5");
#endif

extern "C" {
extern __attribute__((weak, visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;  // reference counts are atomic
}

namespace std {
[[noreturn]] void __throw_bad_alloc();
__attribute__((weak, visibility("hidden"))) void __throw_bad_array_new_length() { __throw_bad_alloc(); }
}  // namespace std
