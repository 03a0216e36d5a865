# Language standards, warning flags, sanitizers, ccache and the optional CUDA language.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(HELICORE_CCACHE ccache)
if(HELICORE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${HELICORE_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${HELICORE_CCACHE}")
endif()

# gcc's flow warnings are unreliable in instrumented code: there they stay warnings.
set(HELICORE_WERROR $<$<NOT:$<BOOL:${HELICORE_SANITIZE}>>:-Werror>)
add_library(helicore_flags INTERFACE)
target_compile_options(helicore_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra> $<$<COMPILE_LANGUAGE:CXX>:${HELICORE_WERROR}>)
if(HELICORE_DEBUG_CHECKS)
  target_compile_definitions(helicore_flags INTERFACE HELICORE_DEBUG_CHECKS=1)
endif()

if(HELICORE_SANITIZE)
  string(REPLACE ";" "," _sanitizers "${HELICORE_SANITIZE}")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${_sanitizers}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${_sanitizers})
endif()

# Coverage counters in everything that a fuzz target links. Inputs are choices and not keywords: comparisons
# are not traced, which is several times faster.
if(HELICORE_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "HELICORE_FUZZ=ON needs clang, got ${CMAKE_CXX_COMPILER_ID}; set CMAKE_CXX_COMPILER=clang++")
  endif()
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-coverage=trace-cmp>)
endif()

find_package(Threads REQUIRED)

# CUDA: AUTO turns it on when nvcc is there and this CMake can compile CUDA C++20.
set(HELICORE_WITH_CUDA OFF)
if(NOT HELICORE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER AND CMAKE_VERSION VERSION_GREATER_EQUAL 3.28)
    set(HELICORE_WITH_CUDA ON)
  elseif(HELICORE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "HELICORE_CUDA=ON needs nvcc on PATH (found: '${CMAKE_CUDA_COMPILER}') and "
                        "CMake >= 3.28 (this is ${CMAKE_VERSION}; `pip install cmake` brings one)")
  endif()
endif()
if(HELICORE_WITH_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()
