# helicore_add_area(), helicore_add_isa_sources(), helicore_add_test(), and the static and shared libraries.

# Where things are installed. In a wheel everything sits below the Python package, so that
# `-DCMAKE_PREFIX_PATH=$(python -m helicore --cmake-dir)` finds it wherever the wheel is unpacked.
if(SKBUILD)
  set(HELICORE_INSTALL_LIBDIR helicore/lib)
  set(HELICORE_INSTALL_INCLUDEDIR helicore/include)
else()
  set(HELICORE_INSTALL_LIBDIR ${CMAKE_INSTALL_LIBDIR})
  set(HELICORE_INSTALL_INCLUDEDIR ${CMAKE_INSTALL_INCLUDEDIR})
endif()

# helicore_add_area(<area> SOURCES ... [CUDA_SOURCES ...] [NO_CUDA_SOURCES ...])
# One OBJECT library per area. CUDA_SOURCES are compiled when CUDA is on, NO_CUDA_SOURCES when it is off.
function(helicore_add_area area)
  cmake_parse_arguments(ARG "" "" "SOURCES;CUDA_SOURCES;NO_CUDA_SOURCES" ${ARGN})
  set(sources ${ARG_SOURCES})
  if(HELICORE_WITH_CUDA)
    list(APPEND sources ${ARG_CUDA_SOURCES})
  else()
    list(APPEND sources ${ARG_NO_CUDA_SOURCES})
  endif()
  add_library(helicore_${area} OBJECT ${sources})
  target_include_directories(helicore_${area} PUBLIC
    "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/cpp>" "$<INSTALL_INTERFACE:${HELICORE_INSTALL_INCLUDEDIR}>")
  target_compile_features(helicore_${area} PUBLIC cxx_std_20)
  target_link_libraries(helicore_${area} PRIVATE $<BUILD_INTERFACE:helicore_flags>)
  if(HELICORE_WITH_CUDA AND ARG_CUDA_SOURCES)
    target_include_directories(helicore_${area} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  endif()
  set_property(GLOBAL APPEND PROPERTY HELICORE_AREAS ${area})
endfunction()

# helicore_isa_variants(<out_var> <file.inc.cpp>)
# Writes one source per instruction set that includes <file> with HELICORE_ISA set and the matching flags,
# and returns their names. Included code lives in `namespace HELICORE_ISA_NS` (see core/cpu/simd.h).
function(helicore_isa_variants out_var file)
  get_filename_component(stem ${file} NAME_WE)
  set(result "")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(isas generic avx2 avx512 avx512bf16)
  else()
    set(isas generic)
  endif()
  # Included by its path below cpp/, so that the compiler cache serves every clone.
  file(RELATIVE_PATH include_path "${PROJECT_SOURCE_DIR}/cpp" "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
  foreach(isa IN LISTS isas)
    set(variant "${CMAKE_CURRENT_BINARY_DIR}/${stem}_${isa}.cpp")
    file(CONFIGURE OUTPUT "${variant}" CONTENT
      "// Generated: ${file} for one instruction set.\n#define HELICORE_ISA_@isa@ 1\n#include \"@include_path@\"\n" @ONLY)
    set(flags "-ffp-contract=fast")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # gcc 12 warns inside its own avx512fintrin.h
      list(APPEND flags -Wno-maybe-uninitialized -Wno-uninitialized)
    endif()
    if(isa STREQUAL "avx2")
      list(APPEND flags -mavx2 -mfma -mf16c)
    elseif(isa STREQUAL "avx512")
      list(APPEND flags -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
    elseif(isa STREQUAL "avx512bf16")
      list(APPEND flags -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c
                        -mprefer-vector-width=512)
    endif()
    set_source_files_properties("${variant}" PROPERTIES COMPILE_OPTIONS "${flags}"
      OBJECT_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
    list(APPEND result "${variant}")
  endforeach()
  set(${out_var} ${result} PARENT_SCOPE)
endfunction()

# The static and the shared library that embedders link, both made of every area's objects.
function(helicore_add_libraries)
  get_property(areas GLOBAL PROPERTY HELICORE_AREAS)
  foreach(kind IN ITEMS static shared)
    string(TOUPPER ${kind} type)
    add_library(helicore_${kind} ${type})
    foreach(area IN LISTS areas)
      target_sources(helicore_${kind} PRIVATE $<TARGET_OBJECTS:helicore_${area}>)
    endforeach()
    target_include_directories(helicore_${kind} PUBLIC
      "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/cpp>" "$<INSTALL_INTERFACE:${HELICORE_INSTALL_INCLUDEDIR}>")
    target_compile_features(helicore_${kind} PUBLIC cxx_std_20)
    target_link_libraries(helicore_${kind} PUBLIC Threads::Threads)
    if(HELICORE_WITH_CUDA)
      target_link_libraries(helicore_${kind} PRIVATE CUDA::cudart_static)
    endif()
    set_target_properties(helicore_${kind} PROPERTIES OUTPUT_NAME helicore LINKER_LANGUAGE CXX
      VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
    add_library(helicore::${kind} ALIAS helicore_${kind})
  endforeach()
  add_library(helicore::helicore ALIAS helicore_static)
endfunction()

# helicore_add_test(<area> <file>...): one GoogleTest binary `<area>_test` per area.
function(helicore_add_test area)
  set(name ${area}_test)
  add_executable(${name} ${ARGN})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp")
  target_link_libraries(${name} PRIVATE helicore_static helicore_flags GTest::gmock GTest::gtest_main)
  if(HELICORE_WITH_CUDA)
    target_link_libraries(${name} PRIVATE CUDA::cudart_static)
    target_compile_definitions(${name} PRIVATE HELICORE_WITH_CUDA=1)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES LABELS ${area})
endfunction()

# Headers, both libraries and the CMake package. Kernels (cpu/, cuda/) and test introspection stay inside.
function(helicore_install)
  include(CMakePackageConfigHelpers)
  set(package_dir ${HELICORE_INSTALL_LIBDIR}/cmake/helicore)
  set_target_properties(helicore_static PROPERTIES EXPORT_NAME static)
  set_target_properties(helicore_shared PROPERTIES EXPORT_NAME shared)
  set(namelink "")
  if(SKBUILD)  # wheels hold no symbolic links: one file, named by its soname
    set_target_properties(helicore_shared PROPERTIES VERSION "${PROJECT_VERSION_MAJOR}")
    set(namelink NAMELINK_SKIP)
  endif()
  install(TARGETS helicore_static helicore_shared EXPORT helicore-targets
    ARCHIVE DESTINATION ${HELICORE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${HELICORE_INSTALL_LIBDIR} ${namelink}
    INCLUDES DESTINATION ${HELICORE_INSTALL_INCLUDEDIR})
  install(EXPORT helicore-targets NAMESPACE helicore:: DESTINATION ${package_dir})
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/cpp/helicore" DESTINATION ${HELICORE_INSTALL_INCLUDEDIR}
    FILES_MATCHING PATTERN "*.h" PATTERN "cpu" EXCLUDE PATTERN "cuda" EXCLUDE
    PATTERN "introspection.h" EXCLUDE)
  foreach(header IN ITEMS core/cpu/isa.h core/cuda/runtime.h)
    get_filename_component(folder ${header} DIRECTORY)
    install(FILES "${PROJECT_SOURCE_DIR}/cpp/helicore/${header}"
      DESTINATION ${HELICORE_INSTALL_INCLUDEDIR}/helicore/${folder})
  endforeach()
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/helicore-config.cmake.in"
    "${PROJECT_BINARY_DIR}/helicore-config.cmake" INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file("${PROJECT_BINARY_DIR}/helicore-config-version.cmake"
    COMPATIBILITY SameMinorVersion)
  install(FILES "${PROJECT_BINARY_DIR}/helicore-config.cmake"
    "${PROJECT_BINARY_DIR}/helicore-config-version.cmake" DESTINATION ${package_dir})
endfunction()
