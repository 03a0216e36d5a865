#include "helicore/core/tensor_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "helicore/core/error.h"

namespace helicore {
namespace {

using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "no error";
}

TEST(TensorViewTest, check_shape_names_argument_expectation_and_value) {
  float data[6];
  TensorView t = make_view(data, DType::kFloat32, {2, 3});
  check_shape(t, {-1, 3}, "op", "x");
  EXPECT_THAT(message_of([&] { check_shape(t, {2, 4}, "nn.op", "x"); }),
              HasSubstr("[nn.op] x must have shape [2, 4], got float32[2, 3] on cpu"));
  EXPECT_THAT(message_of([&] { check_dtype(t, DType::kInt32, "nn.op", "x"); }),
              HasSubstr("x must be int32"));
}

TEST(TensorViewTest, contiguity_ignores_strides_of_unit_dimensions) {
  float data[6];
  TensorView t = make_view(data, DType::kFloat32, {1, 6});
  t.strides[0] = 999;
  EXPECT_TRUE(t.is_contiguous());
  t = make_view(data, DType::kFloat32, {2, 2});
  t.strides[0] = 3;
  EXPECT_FALSE(t.is_contiguous());
  check_row_major(t, "op", "x");
}

}  // namespace
}  // namespace helicore
