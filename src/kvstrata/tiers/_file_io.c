/* Moves whole chunks between files and memory, outside the interpreter's lock.
 *
 * A chunk's file is one header page and the payload, which lies in memory in several parts. What
 * the functions promise is written in `file_io.py`; `python_file_io.py` does the same in Python.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h> /* rename */
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "counters in files are little-endian"
#endif

enum {
    PAGE_BYTES = 4096,
    MOST_PARTS = 1024, /* IOV_MAX on Linux */
    MOST_COUNTERS = 16,
};

/* Where a header page has what; see `chunk_format.py`. Numbers are little-endian. */
enum { LENGTH_AT = 10, SEAL_AT = 14, BODY_AT = 22 };

static Digester *digest_parts = digest_baseline;

/* --- memory ------------------------------------------------------------------------------- */

/* Memory that Python objects lend until `give_back`: a header page, and a payload in parts. */
typedef struct {
    Py_buffer *lent;
    size_t num_lent;
    struct iovec *iov; /* what is moved next; has room for one more than was lent */
    size_t num_iov;
} Memory;

static void give_back(Memory *memory)
{
    while (memory->num_lent > 0)
        PyBuffer_Release(&memory->lent[--memory->num_lent]);
    PyMem_Free(memory->lent);
    PyMem_Free(memory->iov);
}

static bool borrow_one(Memory *memory, PyObject *object, int flags)
{
    if (PyObject_GetBuffer(object, &memory->lent[memory->num_lent], flags) < 0)
        return false;
    memory->num_lent++;
    return true;
}

static bool borrow_all(Memory *memory, PyObject *header, PyObject *parts, int flags)
{
    Py_ssize_t count = PyTuple_Size(parts);

    memory->lent = PyMem_Malloc((size_t)(count + 1) * sizeof *memory->lent);
    memory->iov = PyMem_Malloc((size_t)(count + 2) * sizeof *memory->iov);
    if (!memory->lent || !memory->iov) {
        PyErr_NoMemory();
        return false;
    }
    if (!borrow_one(memory, header, PyBUF_WRITABLE))
        return false;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!borrow_one(memory, PyTuple_GetItem(parts, i), flags))
            return false;
    return true;
}

static bool has_room(const Memory *memory, Py_ssize_t num_bytes)
{
    Py_ssize_t room = 0;

    for (size_t i = 0; i < memory->num_lent; i++)
        room += memory->lent[i].len;
    if (num_bytes >= memory->lent[0].len && num_bytes <= room)
        return true;
    PyErr_Format(PyExc_ValueError, "room for %zd bytes, asked for %zd", room, num_bytes);
    return false;
}

/* Borrow memory for `num_bytes` bytes, header included; on an exception nothing is lent. */
static bool borrow(Memory *memory, PyObject *header, PyObject *parts, int flags,
                   Py_ssize_t num_bytes)
{
    *memory = (Memory){0};
    if (borrow_all(memory, header, parts, flags) && has_room(memory, num_bytes))
        return true;
    give_back(memory);
    return false;
}

/* How long a header's body is, as the header says. */
static size_t stated_length(const unsigned char *header)
{
    const unsigned char *at = header + LENGTH_AT;

    return at[0] | (size_t)at[1] << 8 | (size_t)at[2] << 16 | (size_t)at[3] << 24;
}

/* Whether the first thing lent is a page, and says a length that can be. */
static bool has_header(const Memory *memory)
{
    size_t length = 0;

    if (memory->lent[0].len == PAGE_BYTES)
        length = stated_length(memory->lent[0].buf);
    if (length >= DIGEST_BYTES && length <= PAGE_BYTES - BODY_AT)
        return true;
    PyErr_SetString(PyExc_ValueError, "no header page to complete");
    return false;
}

/* Make the first `num_bytes` bytes, or all there are, what is moved next. */
static void choose_front(Memory *memory, size_t num_bytes)
{
    memory->num_iov = 0;
    for (size_t i = 0; i < memory->num_lent && num_bytes > 0; i++) {
        size_t len = (size_t)memory->lent[i].len;
        size_t count = len < num_bytes ? len : num_bytes;
        memory->iov[memory->num_iov++] = (struct iovec){memory->lent[i].buf, count};
        num_bytes -= count;
    }
}

/* The same up to the end of the last page; whether that lies on pages, as direct I/O needs it. */
static bool choose_pages(Memory *memory, size_t num_bytes)
{
    choose_front(memory, (num_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    for (size_t i = 0; i < memory->num_iov; i++)
        if (((uintptr_t)memory->iov[i].iov_base | memory->iov[i].iov_len) % PAGE_BYTES)
            return false;
    return true;
}

/* --- system calls, without the interpreter's lock ------------------------------------------ */

/* Whether a failed call is to be made again: a signal came, and no handler raised anything. */
static bool was_interrupted(void)
{
    PyGILState_STATE state;
    bool goes_on;

    if (errno != EINTR)
        return false;
    state = PyGILState_Ensure();
    goes_on = PyErr_CheckSignals() == 0;
    PyGILState_Release(state);
    errno = EINTR;
    return goes_on;
}

#define UNINTERRUPTED(result, call) \
    do                              \
        (result) = (call);          \
    while ((result) < 0 && was_interrupted())

static int open_file(const char *path, int flags)
{
    int fd;

    UNINTERRUPTED(fd, open(path, flags | O_CLOEXEC, 0600));
    return fd;
}

/* Take `count` bytes off the front of what is moved next. */
static void advance(struct iovec **iov, size_t *num_iov, size_t count)
{
    while (*num_iov > 0 && count >= (*iov)->iov_len) {
        count -= (*iov)->iov_len;
        (*iov)++;
        (*num_iov)--;
    }
    if (*num_iov > 0) {
        (*iov)->iov_base = (char *)(*iov)->iov_base + count;
        (*iov)->iov_len -= count;
    }
}

typedef ssize_t Mover(int fd, const struct iovec *iov, int count, off_t offset);

/* Move bytes until `size` or more have been, or the file ends; how many, or -1. */
static ssize_t move(Mover *mover, int fd, const Memory *memory, size_t size)
{
    struct iovec *iov = memory->iov;
    size_t num_iov = memory->num_iov, offset = 0;
    ssize_t count = 1;

    while (offset < size && count > 0) {
        int num_parts = num_iov < MOST_PARTS ? (int)num_iov : MOST_PARTS;
        UNINTERRUPTED(count, mover(fd, iov, num_parts, (off_t)offset));
        if (count < 0)
            return -1;
        advance(&iov, &num_iov, (size_t)count);
        offset += (size_t)count;
    }
    return (ssize_t)offset;
}

static void close_quietly(int fd)
{
    int error = errno;

    close(fd);
    errno = error;
}

/* Recency is the access time, set by hand; a read-only mount still serves chunks. */
static void note_use(int fd)
{
    struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_OMIT}};

    (void)futimens(fd, times);
}

typedef struct {
    const char *path;
    const char *temporary;
    size_t num_bytes; /* of header and payload */
    int is_direct;
    int notes_use;
    int syncs;
} Task;

/* Read and digest a file; how many bytes it has, as far as there is room and a page, or -1. */
static ssize_t read_file(const Task *task, Memory *memory, unsigned char *digest)
{
    _Alignas(PAGE_BYTES) char spare[PAGE_BYTES]; /* for bytes that should not be there */
    bool is_direct = choose_pages(memory, task->num_bytes) && task->is_direct;
    int fd = open_file(task->path, O_RDONLY | (is_direct ? O_DIRECT : 0));
    ssize_t count;

    if (fd < 0)
        return -1;
    memory->iov[memory->num_iov++] = (struct iovec){spare, PAGE_BYTES};
    count = move(preadv, fd, memory, task->num_bytes);
    if (count == (ssize_t)task->num_bytes) {
        choose_front(memory, task->num_bytes);
        digest_parts(memory->iov + 1, task->num_bytes - memory->iov[0].iov_len, digest);
        if (task->notes_use)
            note_use(fd);
    }
    close_quietly(fd);
    return count;
}

static bool write_all(int fd, const Memory *memory, size_t num_bytes)
{
    ssize_t count = move(pwritev, fd, memory, num_bytes);

    if (count >= 0 && (size_t)count < num_bytes)
        errno = EIO;
    return count >= 0 && (size_t)count >= num_bytes;
}

static bool lock_file(int fd)
{
    int result;

    UNINTERRUPTED(result, flock(fd, LOCK_EX | LOCK_NB));
    return result == 0;
}

static bool set_size(int fd, size_t num_bytes)
{
    int result;

    UNINTERRUPTED(result, ftruncate(fd, (off_t)num_bytes));
    return result == 0;
}

static bool sync_data(int fd)
{
    int result;

    UNINTERRUPTED(result, fdatasync(fd));
    return result == 0;
}

/* The lock tells that the file's writer lives. */
static bool fill_and_publish(int fd, const Task *task, const Memory *memory, bool is_direct)
{
    bool is_longer = is_direct && task->num_bytes % PAGE_BYTES;

    return lock_file(fd) && write_all(fd, memory, task->num_bytes) &&
           (!is_longer || set_size(fd, task->num_bytes)) && (!task->syncs || sync_data(fd)) &&
           rename(task->temporary, task->path) == 0;
}

/* Complete the header: the payload's digest ends its body, the body's checksum precedes it. */
static void seal(unsigned char *header, Memory *memory, size_t num_bytes)
{
    size_t body_bytes = stated_length(header);

    choose_front(memory, num_bytes);
    digest_parts(memory->iov + 1, num_bytes - PAGE_BYTES,
                 header + BODY_AT + body_bytes - DIGEST_BYTES);
    checksum_bytes(header + BODY_AT, body_bytes, header + SEAL_AT);
}

/* Write a file aside and give it its name, or leave nothing behind; the error of closing it. */
static bool write_file(const Task *task, Memory *memory, int *close_error)
{
    bool is_direct;
    int fd;

    seal(memory->lent[0].buf, memory, task->num_bytes);
    is_direct = choose_pages(memory, task->num_bytes) && task->is_direct;
    fd = open_file(task->temporary, O_CREAT | O_EXCL | O_WRONLY | (is_direct ? O_DIRECT : 0));
    if (fd < 0)
        return false;
    if (!is_direct)
        choose_front(memory, task->num_bytes);
    if (!fill_and_publish(fd, task, memory, is_direct)) {
        close_quietly(fd);
        int error = errno;
        unlink(task->temporary);
        errno = error;
        return false;
    }
    *close_error = close(fd) < 0 && errno != EINTR ? errno : 0;
    return true;
}

/* Add to the counters in a file, which are 0 if it is shorter, under its lock. */
static bool add_to_file(int fd, int64_t *counters, size_t num_bytes, const int64_t *change)
{
    ssize_t count;
    int error;

    if (!lock_file(fd))
        return false;
    count = pread(fd, counters, num_bytes, 0);
    if (count >= 0) {
        if ((size_t)count < num_bytes)
            memset(counters, 0, num_bytes);
        for (size_t i = 0; i < num_bytes / sizeof *counters; i++)
            counters[i] += change[i];
        count = pwrite(fd, counters, num_bytes, 0);
    }
    error = count < 0 ? errno : EIO;
    flock(fd, LOCK_UN);
    errno = error;
    return count == (ssize_t)num_bytes;
}

/* --- Python ------------------------------------------------------------------------------- */

static PyObject *raise_errno(const char *path)
{
    if (!PyErr_Occurred()) /* a signal's handler may have raised */
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    return NULL;
}

static PyObject *run_read(const Task *task, Memory *memory)
{
    unsigned char digest[DIGEST_BYTES];
    ssize_t count;

    Py_BEGIN_ALLOW_THREADS
    count = read_file(task, memory, digest);
    Py_END_ALLOW_THREADS
    if (count < 0)
        return raise_errno(task->path);
    return Py_BuildValue("(ny#)", (Py_ssize_t)count, (char *)digest,
                         (Py_ssize_t)(count == (ssize_t)task->num_bytes ? DIGEST_BYTES : 0));
}

static PyObject *read_chunk(PyObject *module, PyObject *args, PyObject *options)
{
    static char *names[] = {"", "", "", "num_bytes", "direct", "note_use", NULL};
    PyObject *path, *header, *parts, *result = NULL;
    Py_ssize_t num_bytes;
    Memory memory;
    Task task = {0};

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, options, "O&OO!$npp", names, PyUnicode_FSConverter,
                                     &path, &header, &PyTuple_Type, &parts, &num_bytes,
                                     &task.is_direct, &task.notes_use))
        return NULL;
    task.path = PyBytes_AsString(path);
    task.num_bytes = (size_t)num_bytes;
    if (borrow(&memory, header, parts, PyBUF_WRITABLE, num_bytes)) {
        result = run_read(&task, &memory);
        give_back(&memory);
    }
    Py_DECREF(path);
    return result;
}

static PyObject *run_write(const Task *task, Memory *memory)
{
    int close_error = 0;
    bool is_published;

    Py_BEGIN_ALLOW_THREADS
    is_published = write_file(task, memory, &close_error);
    Py_END_ALLOW_THREADS
    return is_published ? PyLong_FromLong(close_error) : raise_errno(task->path);
}

static PyObject *write_chunk(PyObject *module, PyObject *args, PyObject *options)
{
    static char *names[] = {"", "", "", "", "num_bytes", "direct", "sync", NULL};
    PyObject *temporary, *path, *header, *parts, *result = NULL;
    Py_ssize_t num_bytes;
    Memory memory;
    Task task = {0};

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, options, "O&O&OO!$npp", names, PyUnicode_FSConverter,
                                     &temporary, PyUnicode_FSConverter, &path, &header,
                                     &PyTuple_Type, &parts, &num_bytes, &task.is_direct,
                                     &task.syncs))
        return NULL;
    task.temporary = PyBytes_AsString(temporary);
    task.path = PyBytes_AsString(path);
    task.num_bytes = (size_t)num_bytes;
    if (borrow(&memory, header, parts, PyBUF_SIMPLE, num_bytes)) {
        if (has_header(&memory))
            result = run_write(&task, &memory);
        give_back(&memory);
    }
    Py_DECREF(temporary);
    Py_DECREF(path);
    return result;
}

static PyObject *add(PyObject *module, PyObject *args)
{
    int64_t counters[MOST_COUNTERS], change[MOST_COUNTERS];
    const char *bytes;
    Py_ssize_t num_bytes;
    bool is_done;
    int fd;

    (void)module;
    if (!PyArg_ParseTuple(args, "iy#", &fd, &bytes, &num_bytes))
        return NULL;
    if ((size_t)num_bytes > sizeof change || (size_t)num_bytes % sizeof *change)
        return PyErr_Format(PyExc_ValueError, "%zd bytes are no counters", num_bytes);
    memcpy(change, bytes, (size_t)num_bytes);
    Py_BEGIN_ALLOW_THREADS
    is_done = add_to_file(fd, counters, (size_t)num_bytes, change);
    Py_END_ALLOW_THREADS
    if (!is_done)
        return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
    return PyBytes_FromStringAndSize((const char *)counters, num_bytes);
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "Add to the counters in a file."},
    {"read", (PyCFunction)(void (*)(void))read_chunk, METH_VARARGS | METH_KEYWORDS,
     "Fill memory from a file."},
    {"write", (PyCFunction)(void (*)(void))write_chunk, METH_VARARGS | METH_KEYWORDS,
     "Make a file from memory."},
    {0},
};

static int choose_digester(PyObject *module)
{
    (void)module;
#ifdef KVSTRATA_AVX2
    if (__builtin_cpu_supports("avx2"))
        digest_parts = digest_avx2;
#endif
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, choose_digester}, {0}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvstrata.tiers._file_io",
    .m_doc = "Whole chunks between files and memory.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__file_io(void)
{
    return PyModuleDef_Init(&definition);
}
