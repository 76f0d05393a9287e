/* Copies rows of caches to and from a chunk's memory, outside the interpreter's lock.
 *
 * A payload is, piece after piece of a group, that piece's rows; it lies in memory in several
 * parts, cut at any byte. What the functions promise is written in `native_copier.py`.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* A range of bytes in every row of a group, as Python packs it. */
typedef struct {
    int64_t address; /* of row 0 */
    int64_t row_stride;
    int64_t row_bytes;
} Piece;

/* The pieces of a group. */
typedef struct {
    const char *packed;
    size_t num_pieces;
    Py_ssize_t num_rows;
    size_t row_bytes; /* over all pieces */
} Pages;

/* One chunk's copy: what lies where. */
typedef struct {
    Pages pages;
    Py_ssize_t *rows; /* of the caches, in the order of the payload's */
    size_t num_rows;
    size_t first_row; /* rows of the payload before the first that is copied */
    size_t payload_rows;
    Py_buffer *parts;
    size_t num_parts;
} Copy;

/* --- arguments ----------------------------------------------------------------------------- */

static void give_back(Copy *copy)
{
    while (copy->num_parts > 0)
        PyBuffer_Release(&copy->parts[--copy->num_parts]);
    PyMem_Free(copy->parts);
    PyMem_Free(copy->rows);
}

static Piece piece_at(const Pages *pages, size_t index)
{
    Piece piece;

    memcpy(&piece, pages->packed + index * sizeof piece, sizeof piece);
    return piece;
}

static bool read_pages(Pages *pages, const char *packed, Py_ssize_t num_bytes)
{
    bool is_sound = num_bytes > 0 && (size_t)num_bytes % sizeof(Piece) == 0;

    pages->packed = packed;
    pages->num_pieces = (size_t)num_bytes / sizeof(Piece);
    for (size_t i = 0; i < pages->num_pieces; i++) {
        Piece piece = piece_at(pages, i);
        is_sound &= piece.address > 0 && piece.row_stride >= 0 && piece.row_bytes > 0;
        pages->row_bytes += (size_t)piece.row_bytes;
    }
    if (!is_sound)
        PyErr_SetString(PyExc_ValueError, "these are no pieces of a group");
    return is_sound;
}

static bool read_rows(Copy *copy, PyObject *rows)
{
    copy->num_rows = (size_t)PyTuple_Size(rows);
    copy->rows = PyMem_Malloc((copy->num_rows + 1) * sizeof *copy->rows);
    if (!copy->rows) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < copy->num_rows; i++) {
        Py_ssize_t row = PyLong_AsSsize_t(PyTuple_GetItem(rows, (Py_ssize_t)i));
        if (row == -1 && PyErr_Occurred())
            return false;
        if (row < 0 || row >= copy->pages.num_rows) {
            PyErr_Format(PyExc_IndexError, "row %zd of %zd", row, copy->pages.num_rows);
            return false;
        }
        copy->rows[i] = row;
    }
    return true;
}

/* Whether the payload has whole rows, and all that are asked for. */
static bool read_payload(Copy *copy, Py_ssize_t num_bytes, Py_ssize_t first_row)
{
    size_t size = num_bytes < 0 ? 0 : (size_t)num_bytes;

    copy->payload_rows = size / copy->pages.row_bytes;
    copy->first_row = first_row < 0 ? 0 : (size_t)first_row;
    if (num_bytes >= 0 && first_row >= 0 && size % copy->pages.row_bytes == 0 &&
        copy->first_row <= copy->payload_rows &&
        copy->num_rows <= copy->payload_rows - copy->first_row)
        return true;
    PyErr_Format(PyExc_ValueError, "payload of %zd bytes for %zu rows of %zu bytes from row %zd",
                 num_bytes, copy->num_rows, copy->pages.row_bytes, first_row);
    return false;
}

/* Borrow the payload's memory, which has to be large enough for it. */
static bool read_parts(Copy *copy, PyObject *parts, int flags, Py_ssize_t num_bytes)
{
    Py_ssize_t count = PyTuple_Size(parts), room = 0;

    copy->parts = PyMem_Malloc((size_t)(count + 1) * sizeof *copy->parts);
    if (!copy->parts) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(parts, i), &copy->parts[i], flags) < 0)
            return false;
        copy->num_parts++;
        room += copy->parts[i].len;
    }
    if (room >= num_bytes)
        return true;
    PyErr_Format(PyExc_ValueError, "room for %zd bytes, the payload has %zd", room, num_bytes);
    return false;
}

/* Read a call's arguments; on an exception nothing is borrowed. */
static bool read_arguments(Copy *copy, PyObject *args, int flags)
{
    const char *pieces;
    PyObject *rows, *parts;
    Py_ssize_t pieces_bytes, num_bytes, first_row;

    *copy = (Copy){0};
    if (!PyArg_ParseTuple(args, "y#nO!O!nn", &pieces, &pieces_bytes, &copy->pages.num_rows,
                          &PyTuple_Type, &rows, &PyTuple_Type, &parts, &num_bytes, &first_row))
        return false;
    if (read_pages(&copy->pages, pieces, pieces_bytes) && read_rows(copy, rows) &&
        read_payload(copy, num_bytes, first_row) && read_parts(copy, parts, flags, num_bytes))
        return true;
    give_back(copy);
    return false;
}

/* --- bytes, without the interpreter's lock -------------------------------------------------- */

/* A place in a payload, which moves towards its end. */
typedef struct {
    const Py_buffer *part;
    size_t offset;
} Place;

/* The memory at a place, at most `num_bytes` of it and at least one; the place is behind it then. */
static char *take(Place *place, size_t *num_bytes)
{
    char *memory;

    while (place->offset == (size_t)place->part->len) {
        place->part++;
        place->offset = 0;
    }
    if (*num_bytes > (size_t)place->part->len - place->offset)
        *num_bytes = (size_t)place->part->len - place->offset;
    memory = (char *)place->part->buf + place->offset;
    place->offset += *num_bytes;
    return memory;
}

static void skip(Place *place, size_t num_bytes)
{
    while (num_bytes > 0) {
        size_t count = num_bytes;
        take(place, &count);
        num_bytes -= count;
    }
}

typedef void Mover(char *row, char *payload, size_t num_bytes);

static void move_out(char *row, char *payload, size_t num_bytes)
{
    memcpy(payload, row, num_bytes);
}

static void move_in(char *row, char *payload, size_t num_bytes)
{
    memcpy(row, payload, num_bytes);
}

static void move_row(Mover *mover, char *row, Place *place, size_t num_bytes)
{
    while (num_bytes > 0) {
        size_t count = num_bytes;
        char *payload = take(place, &count);
        mover(row, payload, count);
        row += count;
        num_bytes -= count;
    }
}

static void move_all(Mover *mover, const Copy *copy)
{
    size_t rows_behind = copy->payload_rows - copy->first_row - copy->num_rows;
    Place place = {copy->parts, 0};

    for (size_t i = 0; copy->num_rows > 0 && i < copy->pages.num_pieces; i++) {
        Piece piece = piece_at(&copy->pages, i);
        char *base = (char *)(intptr_t)piece.address;
        size_t row_bytes = (size_t)piece.row_bytes;

        skip(&place, copy->first_row * row_bytes);
        for (size_t j = 0; j < copy->num_rows; j++)
            move_row(mover, base + copy->rows[j] * piece.row_stride, &place, row_bytes);
        skip(&place, rows_behind * row_bytes);
    }
}

/* --- Python -------------------------------------------------------------------------------- */

static void run(Mover *mover, const Copy *copy)
{
    Py_BEGIN_ALLOW_THREADS
    move_all(mover, copy);
    Py_END_ALLOW_THREADS
}

static PyObject *load(PyObject *module, PyObject *args)
{
    Copy copy;

    (void)module;
    if (!read_arguments(&copy, args, PyBUF_SIMPLE))
        return NULL;
    run(move_in, &copy);
    give_back(&copy);
    Py_RETURN_NONE;
}

static PyObject *store(PyObject *module, PyObject *args)
{
    Copy copy;
    bool is_whole;

    (void)module;
    if (!read_arguments(&copy, args, PyBUF_WRITABLE))
        return NULL;
    is_whole = copy.num_rows == copy.payload_rows;
    if (is_whole)
        run(move_out, &copy);
    else
        PyErr_Format(PyExc_ValueError, "%zu rows for a payload of %zu", copy.num_rows,
                     copy.payload_rows);
    give_back(&copy);
    if (!is_whole)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, "Copy rows of a payload into caches."},
    {"store", store, METH_VARARGS, "Copy rows of caches into a payload."},
    {0},
};

static PyModuleDef_Slot slots[] = {{0}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstrata.transfers._row_copy",
    .m_doc = "Rows of caches to and from a chunk's memory.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__row_copy(void)
{
    return PyModuleDef_Init(&definition);
}
