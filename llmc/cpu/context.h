// context.h -- changing from one stack to another: the heart of a fiber.
//
// switch_stack(&save, to): pushes the registers that a called function must preserve, stores the stack pointer in
// `save`, takes `to` as the new stack pointer, pops the registers that were pushed there, and returns: into the code
// that once called switch_stack on that stack. Everything else is dead across a call by the rules of the ABI, so this
// is all it takes: about 2 ns. The portable ucontext makes two system calls instead (250-380 ns); -DLLMC_UCONTEXT
// selects it, and so does any processor that is neither x86-64 nor aarch64.
//
// new_stack(top, entry, argument) lays out a stack as if switch_stack had been called on it, so that the first switch
// to it calls entry(argument), which must never return. `.cfi_undefined` tells debuggers that the backtrace ends there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "llmc/cpu/sanitizer.h"

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(LLMC_UCONTEXT)
#define LLMC_UCONTEXT
#endif
#ifdef LLMC_UCONTEXT
#include <ucontext.h>
#endif

typedef void (*llmc_stack_entry)(void* argument);

#if defined(LLMC_UCONTEXT)

namespace cpu_device {

LLMC_NO_TSAN inline void switch_stack(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

// makecontext passes ints only, hence two halves for each pointer.
inline void start_ucontext(unsigned entry_high, unsigned entry_low, unsigned argument_high, unsigned argument_low) {
  const uintptr_t entry = static_cast<uintptr_t>(entry_high) << 32 | entry_low;
  const uintptr_t argument = static_cast<uintptr_t>(argument_high) << 32 | argument_low;
  reinterpret_cast<llmc_stack_entry>(entry)(reinterpret_cast<void*>(argument));
}

inline void* new_stack(char* top, size_t size, llmc_stack_entry entry, void* argument) {
  // The ucontext itself (about 1 KiB) lies at the top of the stack it describes.
  const uintptr_t address = (reinterpret_cast<uintptr_t>(top) - sizeof(ucontext_t)) & ~static_cast<uintptr_t>(63);
  ucontext_t* context = reinterpret_cast<ucontext_t*>(address);
  getcontext(context);
  context->uc_stack.ss_sp = top - size;
  context->uc_stack.ss_size = reinterpret_cast<char*>(context) - (top - size);
  context->uc_link = nullptr;
  const uintptr_t e = reinterpret_cast<uintptr_t>(entry), a = reinterpret_cast<uintptr_t>(argument);
  makecontext(context, reinterpret_cast<void (*)()>(start_ucontext), 4, static_cast<unsigned>(e >> 32),
              static_cast<unsigned>(e), static_cast<unsigned>(a >> 32), static_cast<unsigned>(a));
  return context;
}

}  // namespace cpu_device

#else

extern "C" {
void llmc_switch_stack(void** save, void* to);
void llmc_enter_stack();
}

#if defined(__x86_64__)
// System V ABI: rbx, rbp, r12-r15 survive a call.
asm(R"(
.pushsection .text
.p2align 4
.type llmc_switch_stack,@function
llmc_switch_stack:
  .cfi_startproc
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  .cfi_adjust_cfa_offset 48
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  .cfi_adjust_cfa_offset -48
  ret
  .cfi_endproc
.size llmc_switch_stack,.-llmc_switch_stack
.p2align 4
.type llmc_enter_stack,@function
llmc_enter_stack:
  .cfi_startproc
  .cfi_undefined rip
  movq %r12, %rdi
  xorl %ebp, %ebp
  call *%r13
  ud2
  .cfi_endproc
.size llmc_enter_stack,.-llmc_enter_stack
.popsection
)");
#else
// AAPCS64: x19-x28, frame pointer x29, link register x30 and the low halves of v8-v15 survive a call.
asm(R"(
.pushsection .text
.p2align 4
.type llmc_switch_stack,%function
llmc_switch_stack:
  .cfi_startproc
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .cfi_endproc
.size llmc_switch_stack,.-llmc_switch_stack
.p2align 4
.type llmc_enter_stack,%function
llmc_enter_stack:
  .cfi_startproc
  .cfi_undefined x30
  mov x0, x19
  blr x20
  brk #1
  .cfi_endproc
.size llmc_enter_stack,.-llmc_enter_stack
.popsection
)");
#endif

namespace cpu_device {

LLMC_NO_TSAN inline void switch_stack(void** save, void* to) { llmc_switch_stack(save, to); }

inline void* new_stack(char* top, size_t, llmc_stack_entry entry, void* argument) {
  void** frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~static_cast<uintptr_t>(15));
#if defined(__x86_64__)
  // From the stack pointer upwards: r15 r14 r13 r12 rbx rbp, return address, two words of padding: `ret` leaves the
  // stack pointer a multiple of 16, as the call in llmc_enter_stack needs it.
  frame -= 9;
  memset(frame, 0, 9 * sizeof(void*));
  frame[2] = reinterpret_cast<void*>(entry);
  frame[3] = argument;
  frame[6] = reinterpret_cast<void*>(llmc_enter_stack);
#else
  frame -= 20;
  memset(frame, 0, 20 * sizeof(void*));
  frame[0] = argument;
  frame[1] = reinterpret_cast<void*>(entry);
  frame[11] = reinterpret_cast<void*>(llmc_enter_stack);
#endif
  return frame;
}

}  // namespace cpu_device

#endif
