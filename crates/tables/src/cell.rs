//! The Rust types a column may hold, and their Arrow columns.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BooleanArray, Float16Array, ListArray, PrimitiveArray, StringArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Field, Float16Type, Float32Type, Float64Type, Int32Type, Int64Type,
};
use half::f16;

/// One value of a table.
pub(crate) trait Cell: Clone {
    /// Whether the column may hold nulls.
    const NULLABLE: bool = false;
    /// Arrow type of the column.
    fn data_type() -> DataType;
    /// The column of these values.
    fn column<'a>(cells: impl Iterator<Item = &'a Self>) -> ArrayRef
    where
        Self: 'a;
    /// The value in row `i` of a column of [`Cell::data_type`]; not null unless [`Cell::NULLABLE`].
    fn cell(column: &dyn Array, i: usize) -> Self;
    /// Bytes it holds beyond its own size.
    fn heap(&self) -> usize {
        0
    }
}

macro_rules! number {
    ($($rust:ty => $arrow:ty),*) => {$(
        impl Cell for $rust {
            fn data_type() -> DataType {
                <$arrow>::DATA_TYPE
            }
            fn column<'a>(cells: impl Iterator<Item = &'a Self>) -> ArrayRef {
                Arc::new(PrimitiveArray::<$arrow>::from_iter_values(cells.copied()))
            }
            fn cell(column: &dyn Array, i: usize) -> Self {
                column.as_primitive::<$arrow>().value(i)
            }
        }
        impl Cell for Option<$rust> {
            const NULLABLE: bool = true;
            fn data_type() -> DataType {
                <$arrow>::DATA_TYPE
            }
            fn column<'a>(cells: impl Iterator<Item = &'a Self>) -> ArrayRef {
                Arc::new(cells.copied().collect::<PrimitiveArray<$arrow>>())
            }
            fn cell(column: &dyn Array, i: usize) -> Self {
                column.is_valid(i).then(|| column.as_primitive::<$arrow>().value(i))
            }
        }
    )*};
}
number!(i32 => Int32Type, i64 => Int64Type, f32 => Float32Type, f64 => Float64Type);

impl Cell for bool {
    fn data_type() -> DataType {
        DataType::Boolean
    }
    fn column<'a>(cells: impl Iterator<Item = &'a Self>) -> ArrayRef {
        Arc::new(BooleanArray::from(cells.copied().collect::<Vec<_>>()))
    }
    fn cell(column: &dyn Array, i: usize) -> Self {
        column.as_boolean().value(i)
    }
}

macro_rules! bytes {
    ($($rust:ty => $arrow:ty, $view:ident),*) => {$(
        impl Cell for $rust {
            fn data_type() -> DataType {
                <$arrow>::DATA_TYPE
            }
            fn column<'a>(cells: impl Iterator<Item = &'a Self>) -> ArrayRef {
                Arc::new(<$arrow>::from_iter_values(cells))
            }
            fn cell(column: &dyn Array, i: usize) -> Self {
                column.$view::<i32>().value(i).into()
            }
            fn heap(&self) -> usize {
                self.len()
            }
        }
        impl Cell for Option<$rust> {
            const NULLABLE: bool = true;
            fn data_type() -> DataType {
                <$arrow>::DATA_TYPE
            }
            fn column<'a>(cells: impl Iterator<Item = &'a Self>) -> ArrayRef {
                Arc::new(cells.map(Option::as_ref).collect::<$arrow>())
            }
            fn cell(column: &dyn Array, i: usize) -> Self {
                column.is_valid(i).then(|| column.$view::<i32>().value(i).into())
            }
            fn heap(&self) -> usize {
                self.as_ref().map_or(0, |v| v.len())
            }
        }
    )*};
}
bytes!(String => StringArray, as_string, Vec<u8> => BinaryArray, as_binary);

/// A tensor, flat, row-major.
impl Cell for Vec<f16> {
    fn data_type() -> DataType {
        DataType::List(tensor_item())
    }
    fn column<'a>(cells: impl Iterator<Item = &'a Self>) -> ArrayRef {
        let (mut values, mut lengths) = (Vec::new(), Vec::new());
        for cell in cells {
            values.extend_from_slice(cell);
            lengths.push(cell.len());
        }
        let values = Arc::new(Float16Array::from(values));
        Arc::new(ListArray::new(tensor_item(), OffsetBuffer::from_lengths(lengths), values, None))
    }
    fn cell(column: &dyn Array, i: usize) -> Self {
        column.as_list::<i32>().value(i).as_primitive::<Float16Type>().values().to_vec()
    }
    fn heap(&self) -> usize {
        2 * self.len()
    }
}

/// The item field of a tensor column: a tensor holds no nulls.
pub(crate) fn tensor_item() -> Arc<Field> {
    Arc::new(Field::new("element", DataType::Float16, false))
}
